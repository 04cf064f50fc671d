"""A lane that a learner of this machine hands over, as its host sees it.

Who dialled makes no difference: `dialing.py` and `env_server.py` take it here; lane_handover.py is
the gateway's side.
"""

from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.lane_scheduler import LaneLink, next_message
from libtorchbeast.rpc.handshake import Hello, refusal_from_json
from libtorchbeast.shared_lanes import map_lane


async def receive_lane(connection: JsonSocket, hello: Hello, timeout_s: float) -> LaneLink | None:
    """The lane for these environments, free to be written; None if it was lost on the way.

    In a `LaneScheduler`. `Refused`, `LaneClosed`, and what `next_message` raises.
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
