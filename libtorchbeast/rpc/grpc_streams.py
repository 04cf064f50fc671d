"""gRPC streams as links, and deadlines for who is at their other end."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpc._cython import cygrpc

from libtorchbeast.episode_info import InfoSums
from libtorchbeast.rows import Row
from libtorchbeast.rpc.handshake import Hello, Refused
from libtorchbeast.rpc.step_messages import ActionsReader, encode_step

WATCH_S = 0.5  # how often deadlines are looked at

# What an other end must do in time.
INTRODUCE, STEP, READ, ANSWER = "introduced itself", "taken a step", "read its actions", "answered"
READ_GREETING, READ_STATUS = "read the greeting", "read its status"
READ_WEIGHTS = "read its weights"

Read = Callable[[], Awaitable[Any]]
Exchange = Callable[[bytes], Awaitable[Any]]


class Watched:
    """A stream that is ended when the other end lets it wait too long.

    Setting a deadline costs next to nothing: somebody looks at all of them now and then.
    """

    def __init__(self, peer: str, cancel: Callable[[Refused], object]) -> None:
        self.peer = peer
        self._cancel = cancel
        self.num_steps = 0
        self.is_authenticated = False
        self.certified_name = ""  # in the other end's certificate
        self.ended_by: Refused | None = None
        self._deadlines: dict[str, float] = {}  # of what is expected

    def expect(self, what: str, seconds: float) -> None:
        """The other end must do this in time."""
        self._deadlines[what] = time.monotonic() + seconds

    def has_done(self, what: str) -> None:
        self._deadlines.pop(what, None)

    def end(self, why: Refused) -> None:
        if self.ended_by is None:
            self.ended_by = why
            self._cancel(why)

    def check(self) -> None:
        now = time.monotonic()
        for what, deadline in list(self._deadlines.items()):
            if deadline < now:
                text = f"The other end has not {what} in time."
                self.end(Refused("DEADLINE_EXCEEDED", text))


async def watch(streams: set[Watched], tick: Callable[[], None]) -> None:
    """End those that are let wait too long, for ever."""
    while True:
        await asyncio.sleep(WATCH_S)
        tick()
        for stream in list(streams):
            stream.check()


async def exchange(call: Any, data: bytes) -> Any:
    """Write a message and read the next one, after others were; grpc.aio.EOF, or `AioRpcError`.

    Over a call of grpc.aio that this end has made. Each of its own operations passes from the
    thread that reads sockets through another socket to the event loop; here both are one.
    `execute_batch` is no part of what grpc documents: `tests/test_grpc_exchange.py` says whether a
    version of grpcio works.
    """
    received = cygrpc.ReceiveMessageOperation(0)
    operations = (cygrpc.SendMessageOperation(data, 0), received)
    try:
        await cygrpc.execute_batch(call._cython_call, operations, asyncio.get_running_loop())
        message = received.message()
    except cygrpc.ExecuteBatchError:
        message = None
    except asyncio.CancelledError:  # as grpc's own reading does, or the connection would stay open
        call.cancel()
        raise
    return await call.read() if message is None else message  # reading says how a call has ended


class StreamLink:
    """A gRPC stream of environments, whoever dialled."""

    def __init__(self, hello: Hello, exchange: Exchange, watched: Watched, answer_s: float) -> None:
        """`exchange` sends a message and returns the next one; it raises when the link is over."""
        self._exchange = exchange
        self._watched = watched
        self._answer_s = answer_s
        self._actions = ActionsReader(hello.spec, hello.num_envs)

    async def show(self, row: Row, info: InfoSums | None = None) -> Any:
        """The actions for a row; raises what `exchange` does if the learner has left."""
        self._watched.expect(ANSWER, self._answer_s)
        data = await self._exchange(encode_step(row, info))
        self._watched.has_done(ANSWER)
        self._watched.num_steps += 1
        return self._actions.read(data)


@contextlib.asynccontextmanager
async def watched(streams: set[Watched], peer: str) -> Any:
    """The current task as a stream, which is one of `streams` while it lives.

    `Refused` in the place of its cancellation if that is by the stream's `end`.
    """
    task = asyncio.current_task()
    assert task is not None
    stream = Watched(peer, lambda why: task.cancel())
    streams.add(stream)
    try:
        yield stream
    except asyncio.CancelledError:
        if stream.ended_by is None:
            raise  # by somebody else: the other end is gone, or this process ends
        task.uncancel()
        raise stream.ended_by from None
    finally:
        streams.discard(stream)
