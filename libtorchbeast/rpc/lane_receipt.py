"""How a host receives the lane that a learner on this machine hands over.

It is the same for hosts that dial (dialing.py) and hosts that listen (env_server.py). The gateway's
side is lane_handover.py.
"""

from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.lane_scheduler import LaneLink, next_message
from libtorchbeast.rpc.handshake import Hello, refusal_from_json
from libtorchbeast.shared_lanes import map_lane


async def receive_lane(connection: JsonSocket, hello: Hello, timeout_s: float) -> LaneLink | None:
    """Receive a lane for these environments, and wait until it is free.

    Return None if its file descriptor was lost on the way. Raise `Refused`, `LaneClosed`, and what
    `next_message` raises. Runs in a `LaneScheduler`.
    """
    message = await next_message(connection, timeout_s)
    if message["kind"] == "refused":
        raise refusal_from_json(message)
    if message["kind"] != "lane":
        raise UnknownProtocol(f"Expected a lane, got {message['kind']}.")
    lane = map_lane(message.get("fd"), hello.spec, hello.num_envs)
    if lane is None:
        return None
    lane.release()  # the memory stays mapped, and descriptors are scarce
    link = LaneLink(lane, connection)
    await link.attach()
    return link
