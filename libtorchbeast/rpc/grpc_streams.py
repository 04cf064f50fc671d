"""gRPC streams as links, and deadlines for the other end of a stream."""

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

WATCH_S = 0.5  # between two checks of the deadlines

# What the other end must do in time, as in "The other end has not ... in time."
INTRODUCE, STEP, READ, ANSWER = "introduced itself", "taken a step", "read its actions", "answered"
READ_GREETING, READ_STATUS = "read the greeting", "read its status"
READ_WEIGHTS = "read its weights"

Read = Callable[[], Awaitable[Any]]
Exchange = Callable[[bytes], Awaitable[Any]]


class Watched:
    """A stream that is ended if the other end misses a deadline.

    Setting a deadline costs almost nothing, as it needs no timer: `check` is called now and then.
    """

    def __init__(self, peer: str, cancel: Callable[[Refused], object]) -> None:
        self.peer = peer
        self._cancel = cancel
        self.num_steps = 0
        self.is_authenticated = False
        self.certified_name = ""  # the name in the other end's certificate
        self.ended_by: Refused | None = None
        self._deadlines: dict[str, float] = {}  # by what is expected

    def expect(self, what: str, seconds: float) -> None:
        """Set the deadline by which the other end must have done `what`."""
        self._deadlines[what] = time.monotonic() + seconds

    def has_done(self, what: str) -> None:
        """Remove the deadline for `what`."""
        self._deadlines.pop(what, None)

    def end(self, why: Refused) -> None:
        """End the stream for this reason, unless it has been ended before."""
        if self.ended_by is None:
            self.ended_by = why
            self._cancel(why)

    def check(self) -> None:
        """End the stream if the other end has missed a deadline."""
        now = time.monotonic()
        for what, deadline in list(self._deadlines.items()):
            if deadline < now:
                text = f"The other end has not {what} in time."
                self.end(Refused("DEADLINE_EXCEEDED", text))


async def watch(streams: set[Watched], tick: Callable[[], None]) -> None:
    """Call `tick` and check the deadlines of all streams, twice a second, until cancelled."""
    while True:
        await asyncio.sleep(WATCH_S)
        tick()
        for stream in list(streams):
            stream.check()


async def exchange(call: Any, data: bytes) -> Any:
    """Write a message and read the next one, on a connected call that this end has made.

    Return grpc.aio.EOF, or raise `AioRpcError`, if the call has ended. The end of each operation of
    grpc.aio passes from the thread that reads sockets through another socket to the event loop;
    here, writing and reading are one operation. grpc does not document `execute_batch`:
    `tests/test_grpc_exchange.py` shows whether a version of grpcio works.
    """
    received = cygrpc.ReceiveMessageOperation(0)
    operations = (cygrpc.SendMessageOperation(data, 0), received)
    try:
        await cygrpc.execute_batch(call._cython_call, operations, asyncio.get_running_loop())
        message = received.message()
    except cygrpc.ExecuteBatchError:
        message = None
    except asyncio.CancelledError:  # as in grpc's own `read`; else the connection would stay open
        call.cancel()
        raise
    return await call.read() if message is None else message  # `read` says how the call has ended


class StreamLink:
    """The environments' end of a gRPC stream, as a link; either end may have dialled."""

    def __init__(self, hello: Hello, exchange: Exchange, watched: Watched, answer_s: float) -> None:
        """`exchange` sends a message and returns the next one; it raises if the link is over."""
        self._exchange = exchange
        self._watched = watched
        self._answer_s = answer_s
        self._actions = ActionsReader(hello.spec, hello.num_envs)

    async def show(self, row: Row, info: InfoSums | None = None) -> Any:
        """Send a row and return the agent's actions; raise what `exchange` raises."""
        self._watched.expect(ANSWER, self._answer_s)
        data = await self._exchange(encode_step(row, info))
        self._watched.has_done(ANSWER)
        self._watched.num_steps += 1
        return self._actions.read(data)


@contextlib.asynccontextmanager
async def watched(streams: set[Watched], peer: str) -> Any:
    """Yield a stream whose `end` cancels the current task; meanwhile it is in `streams`.

    If the task is cancelled by `end`, raise the `Refused` that `end` was given.
    """
    task = asyncio.current_task()
    assert task is not None
    stream = Watched(peer, lambda why: task.cancel())
    streams.add(stream)
    try:
        yield stream
    except asyncio.CancelledError:
        if stream.ended_by is None:
            raise  # not cancelled by `end`: the other end is gone, or this process ends
        task.uncancel()
        raise stream.ended_by from None
    finally:
        streams.discard(stream)
