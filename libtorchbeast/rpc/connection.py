"""A stream to a learner that listens, from the environments' end."""

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from libtorchbeast.rpc.messages import (
    LEARNER_METHOD,
    Greeting,
    Hello,
    Refused,
    decode_greeting,
    encode_failure,
    encode_hello,
    printable,
)
from libtorchbeast.rpc.security import Address, Security, is_ours

HANDSHAKE_S = 150.0  # a learner may be building its model
ACTION_S = 600.0  # and may be held up for a while later, too
FLUSH_S = 2.0
JOIN_S = 5.0
WATCH_S = 0.5
MAX_MESSAGE_BYTES = 64 << 20

# After these there is something to mend before it makes sense to dial again.
_PERMANENT = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAUTHENTICATED", "UNIMPLEMENTED")


class LearnerGone(Exception):
    """The connection is lost, or there is none yet; dial again."""


class Connection:
    """One stream. `Refused` when the learner says what is wrong, `LearnerGone` when it is gone."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        import grpc

        check_owner(address)
        self._grpc = grpc
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = (security or Security()).channel(address, MAX_MESSAGE_BYTES)
        self._call = self._channel.stream_stream("/" + "/".join(LEARNER_METHOD))(
            iter(self._outgoing.get, None)
        )
        self._watchdog = Watchdog(self._call.cancel)

    def greet(self, hello: Hello) -> Greeting:
        """Introduce the environments, and wait until the learner has accepted them."""
        return decode_greeting(self.exchange(encode_hello(hello), HANDSHAKE_S))

    def exchange(self, data: bytes, timeout_s: float = ACTION_S) -> bytes:
        """Send a message and wait for the answer."""
        self._outgoing.put(data)
        with self._watchdog.limit(timeout_s):
            return self._next()

    def fail(self, text: str) -> None:
        """Tell the learner what went wrong here; it ends the stream."""
        with contextlib.suppress(Refused, LearnerGone), self._watchdog.limit(FLUSH_S):
            self._outgoing.put(encode_failure(text))
            self._next()

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()
        self._watchdog.stop()

    def _next(self) -> bytes:
        try:
            return next(self._call)
        except StopIteration:
            raise LearnerGone("The learner ended the stream.") from None
        except self._grpc.RpcError as error:
            code = error.code().name
            text = printable(error.details() or code)
            if code in _PERMANENT:
                raise Refused(code, text) from error
            raise LearnerGone(text) from error


def check_owner(address: str) -> None:
    """Another user's socket is not told our token; `LearnerGone` if it is one."""
    path = Address.parse(address).path
    with contextlib.suppress(FileNotFoundError):
        if path and not is_ours(path):
            raise LearnerGone(f"The socket {path} belongs to another user; it is not called.")


class Watchdog:
    """Calls a function when something takes too long; a thread that mostly sleeps."""

    def __init__(self, bite: Callable[[], Any]) -> None:
        self._bite = bite
        self._deadline: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(JOIN_S)

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_S):
            deadline = self._deadline
            if deadline is not None and deadline < time.monotonic():
                self._bite()


class BackOff:
    """Pauses that grow, each a little different, so that many do not come back at once."""

    FIRST_S, MAX_S = 0.1, 10.0

    def __init__(self) -> None:
        self._pause_s = self.FIRST_S

    def reset(self) -> None:
        self._pause_s = self.FIRST_S

    def next_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self.MAX_S)
        return pause_s * random.uniform(0.75, 1.25)
