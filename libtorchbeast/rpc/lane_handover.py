"""How a gateway hands lanes over to hosts on this machine, over a unix socket."""

import asyncio
import contextlib
import errno
import socket
import time
from typing import Any

from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.rpc.connected_clients import client_of
from libtorchbeast.rpc.grpc_streams import INTRODUCE, STEP, Watched
from libtorchbeast.rpc.handshake import (
    MAX_TEXT,
    EnvironmentFailed,
    Hello,
    Refused,
    no_descriptor_left,
    refusal_from_json,
)
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.shared_lanes import AGENT, Lane
from libtorchbeast.text import printable

LOOK_S = 0.5  # between two checks that the host still steps


class Host:
    """The connection to a host on this machine, in an event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = JsonSocket(connection)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; raise EOFError if the host is gone."""
        try:
            self._socket.send(kind, **values)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it duplicates the descriptor
                raise no_descriptor_left() from error
            raise EOFError from error

    async def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives in time.

        Raise EOFError if the host is gone, and `UnknownProtocol` if its data is no message.
        """
        deadline = time.monotonic() + timeout_s
        while (message := self._socket.next()) is None:
            try:
                await until_readable(self._socket, deadline - time.monotonic())
            except TimeoutError:
                return None
        return message

    def close(self) -> None:
        self._socket.close()


async def until_readable(connection: Any, timeout_s: float) -> None:
    """Wait until a connection has data to read; raise TimeoutError if none arrives in time."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    fd = connection.fileno()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(fd, wake)
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await ready
    finally:
        loop.remove_reader(fd)


def raise_for_message(message: dict[str, Any]) -> None:
    """Raise the exception that a host's message stands for, as it is not a Hello."""
    kind, text = message["kind"], str(message.get("text"))
    if kind == "failure":
        raise EnvironmentFailed(text[-MAX_TEXT:])
    if kind == "refused":
        raise refusal_from_json(message)
    raise UnknownProtocol(f"Expected a Hello, got {printable(kind)}.")  # also `no_descriptor`


class Stall:
    """Measures for how long a lane's environments have had the turn without taking a step."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._num_passes = -1
        self._since = time.monotonic()

    def lasts_s(self) -> float:
        num_passes = self._lane.num_passes
        if num_passes != self._num_passes or self._lane.turn.state == AGENT:
            self._num_passes, self._since = num_passes, time.monotonic()
        return time.monotonic() - self._since


async def hand_over(stream: Watched, hello: Hello, host: Host, learner: LearnerConnection) -> None:
    """Hand a lane over to the host, and watch the host until it leaves."""
    stream.has_done(INTRODUCE)
    with contextlib.suppress(EOFError), learner.clients.playing(stream, hello):  # EOF: it left
        lane = await learner.lanes.acquire_to_hand_over(hello, client_of(stream))
        lane.name = f"{hello.name} at {stream.peer}"
        try:
            with learner.playing(hello, stream):
                host.send("lane", fd=lane.fd, num_envs=lane.num_envs)
                lane.release()
                stall = Stall(lane)
                while True:
                    message = await host.next(timeout_s=LOOK_S)
                    if message is not None:
                        raise_for_message(message)
                    if stall.lasts_s() > learner.limits.step_s:
                        raise Refused("DEADLINE_EXCEEDED", f"The other end has not {STEP} in time.")
        finally:
            stream.num_steps = lane.num_passes
            learner.lanes.retire(lane)
