"""gRPC calls for one thread that both moves messages and steps environments.

grpc's own Python servers pass each message through a queue to another thread, and `grpc.aio` passes
it through a socket to an event loop, too. In a server with one environment that cost more than the
rest of a step. Here, coroutines wait for grpc's completion queue itself.

`cygrpc` is grpc's undocumented layer between its core and its Python servers:
`tests/test_rpc_server.py` and `tests/test_rpc_bad_peers.py` show whether a version of grpcio works.
"""

import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import grpc
from grpc._cython import cygrpc

from libtorchbeast.rpc.handshake import Refused
from libtorchbeast.text import encodable

logger = logging.getLogger("torchbeast")

TICK_S = 0.25  # between two calls of `tick`
AWAY_S = 0.5  # of stepping environments, after which another thread polls the queue
STOP_S = 1.0  # for calls to end with their server
ENDING = Refused("UNAVAILABLE", "The environments are ending.")
_NEW_CALL, _STOPPED = "new call", "stopped"


class LinkLost(Exception):
    """The other end is gone, or this end has cancelled the call."""


@types.coroutine
def _completion() -> Generator[None, Any, Any]:
    """Suspend the coroutine until `CallServer` resumes it with an event, and return that."""
    return (yield)


class Call:
    """A stream that a client has opened, for a coroutine that waits for one operation at a time."""

    def __init__(self, event: Any) -> None:
        """`event` is that of the new call."""
        self._call = event.call
        self.peer: str = event.call.peer().decode(errors="replace")
        self.method: str = event.call_details.method.decode(errors="replace")
        self.metadata = event.invocation_metadata
        self._has_started = False
        self._is_cancelled = False
        self.coroutine: Coroutine[Any, Any, None] | None = None

    @property
    def identity(self) -> dict[str, list[bytes]]:
        """The other end's certificate and other properties of TLS (`auth_context()`)."""
        said = cygrpc.auth_context(self._call)
        return {name.decode(): list(values) for name, values in said.items()}

    async def read(self) -> bytes:
        """Return the next message; raise `LinkLost` if the other end has left."""
        (received,) = await self._do(cygrpc.ReceiveMessageOperation(0))
        return _message(received)

    async def write(self, data: bytes) -> None:
        await self._do(*self._start(), cygrpc.SendMessageOperation(data, 0))

    async def exchange(self, data: bytes) -> bytes:
        """Write a message and read its answer, in one batch of operations."""
        _, received = await self._do(
            cygrpc.SendMessageOperation(data, 0), cygrpc.ReceiveMessageOperation(0)
        )
        return _message(received)

    async def finish(self, code: str, text: str) -> None:
        """End the call with a status."""
        data = encodable(text).encode()
        status = cygrpc.SendStatusFromServerOperation((), _code(code), data, 0)
        closed = cygrpc.ReceiveCloseOnServerOperation(0)
        await self._do(*self._start(), status, closed)

    def cancel(self, why: Refused) -> None:
        """End the call at once; a coroutine that waits for it gets `LinkLost`."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._call.cancel(_code(why.code), encodable(str(why)))

    def _start(self) -> list[Any]:
        """Return the operations that must precede the first message or status."""
        if self._has_started:
            return []
        self._has_started = True
        return [cygrpc.SendInitialMetadataOperation((), 0)]

    async def _do(self, *operations: Any) -> Any:
        """Run operations as one batch and return their results; raise `LinkLost` if it fails."""
        if self._is_cancelled:
            raise LinkLost("The call was cancelled.")
        self._call.start_server_batch(operations, self)
        event = await _completion()
        if not event.success:
            raise LinkLost("The other end is gone.")
        return event.batch_operations


class CallServer:
    """Accepts calls, and runs a coroutine for each of them, all in one thread."""

    def __init__(
        self,
        serve: Callable[[Call], Coroutine[Any, Any, None]],
        options: list[tuple[str, Any]],
    ) -> None:
        self._serve = serve
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(options, False)
        self._server.register_completion_queue(self._queue)
        self._calls: set[Call] = set()
        self._polled_at = 0.0
        self._found: deque[Any] = deque()  # events that the other thread has polled
        self._is_over = threading.Event()
        self._other = threading.Thread(target=self._poll_meanwhile, name="pings", daemon=True)

    # Methods of grpc's own servers that `Security.add_port` calls.

    def add_insecure_port(self, address: str) -> int:
        return self._server.add_http2_port(address.encode())

    def add_secure_port(self, address: str, credentials: Any) -> int:
        return self._server.add_http2_port(address.encode(), credentials._credentials)

    def start(self) -> None:
        self._server.start()
        self._request_call()
        self._other.start()

    def run(self, is_over: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Serve calls until `is_over()`; call `tick` a few times a second."""
        tick_at = 0.0
        while not is_over():
            self._handle(self._next_event(time.time() + TICK_S))
            now = self._polled_at = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                tick()

    def stop(self) -> None:
        """End all calls, and accept no more."""
        self._is_over.set()
        self._other.join()
        self._server.shutdown(self._queue, _STOPPED)
        for call in list(self._calls):
            call.cancel(ENDING)
        deadline = time.time() + STOP_S
        while (event := self._next_event(deadline)).tag is not _STOPPED:
            if event.completion_type == cygrpc.CompletionType.queue_timeout:
                self._server.cancel_all_calls()
                deadline = time.time() + STOP_S
            self._handle(event)
        self._queue.shutdown()

    def _next_event(self, deadline: float) -> Any:
        return self._found.popleft() if self._found else self._queue.poll(deadline)

    def _poll_meanwhile(self) -> None:
        """Poll the queue while the main thread is in a long step of the environments.

        Versions of grpc before 1.80 answer pings only while a thread polls the queue.
        """
        while not self._is_over.wait(AWAY_S):
            if time.monotonic() - self._polled_at > AWAY_S:
                self._found.append(self._queue.poll(time.time() + AWAY_S / 10))

    def _request_call(self) -> None:
        self._server.request_call(self._queue, self._queue, _NEW_CALL)

    def _handle(self, event: Any) -> None:
        if event.tag is None:
            return  # the poll timed out
        if event.tag is not _NEW_CALL:
            self._resume(event.tag, event)
        elif event.success and self._is_over.is_set():  # a new call, but the server is stopping
            Call(event).cancel(ENDING)
        elif event.success:
            self._request_call()
            call = Call(event)
            call.coroutine = self._serve(call)
            self._calls.add(call)
            self._resume(call, None)

    def _resume(self, call: Call, event: Any) -> None:
        assert call.coroutine is not None
        try:
            call.coroutine.send(event)
        except StopIteration:
            self._calls.discard(call)
        except Exception:  # one call's error must not end the others
            logger.exception("The call of %s failed.", call.peer)
            self._calls.discard(call)
            call.cancel(Refused("INTERNAL", "This end failed with an internal error; see its log."))


def _message(received: Any) -> bytes:
    data = received.message()
    if data is None:
        raise LinkLost("The other end closed the stream.")
    return data


def _code(name: str) -> Any:
    return grpc.StatusCode[name].value[0]
