"""The actor's end of its stream to a learner: a thread that sends rollouts and fetches weights.

    ActorLink   dials the learner until it is stopped, in a thread of its own
    Session     one stream: the state that this thread shares with the thread that acts

The thread that acts steps environments and runs the model. It waits for the network only if it has
no weights that it may use, or more than `rollouts_ahead` rollouts in transit. Any error of a stream
ends its session, and the link dials again.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rpc import grpc_loops
from libtorchbeast.rpc.actor_messages import (
    Welcome,
    decode_learner_message,
    decode_welcome,
    encode_actor_failure,
    encode_actor_hello,
    encode_request,
)
from libtorchbeast.rpc.dialing import (
    FLUSH_S,
    NO_LINK,
    LearnerGone,
    Redial,
    Unfit,
    dial_call,
    finish_writing,
    kept_connections,
    token_now,
)
from libtorchbeast.rpc.grpc_loops import first_of
from libtorchbeast.rpc.handshake import Hello, Refused, check_fit, invalid
from libtorchbeast.rpc.messages import ACTOR_METHOD
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.weights import Assembly

logger = logging.getLogger("torchbeast")

TICK_S = 0.25  # between two calls of `tick` while a thread waits
JOIN_S = 10.0
OLD_LEARNER = "This learner takes no actors that carry the model; update it, or use polybeast_env."


class SessionOver(Exception):
    """The stream has ended, or the link was stopped."""


class Session:
    """One stream to the learner. The link's condition `changed` guards what both threads use."""

    def __init__(self, welcome: Welcome, changed: threading.Condition) -> None:
        self.welcome = welcome
        self.weights: tuple[int, bytes] | None = None
        """The newest weights received: their version and their bytes."""
        self.newest = -1
        """The newest version that the learner has reported."""
        self.num_untaken = 0
        """Rollouts that were sent and not yet taken by the learner."""
        self.version_at_taken = -1
        """The learner's version when it took the last rollout."""
        self.is_over = False
        self._changed = changed
        self._is_asking = False
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._ended_by: Exception | None = None  # set if this end ends the stream
        self._assembly = Assembly(welcome.weights_bytes)

    # Called by the thread that acts.

    def wait_for(self, condition: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Wait until `condition()` is true; raise `SessionOver` if the session ends before.

        `tick` is called a few times a second meanwhile.
        """
        with self._changed:
            while not self.is_over and not condition():
                tick()
                self._changed.wait(TICK_S)
            self.check()

    def check(self) -> None:
        """Raise `SessionOver` if the session has ended."""
        if self.is_over:
            raise SessionOver

    def ask_for_weights(self) -> None:
        """Request weights newer than `self.weights`, unless an earlier request is still open."""
        with self._changed:
            if self._is_asking or self.is_over:
                return
            self._is_asking = True
            have = -1 if self.weights is None else self.weights[0]
        self._put(encode_request(have))

    def send_rollout(self, data: bytes) -> None:
        with self._changed:
            self.num_untaken += 1
        self._put(data)

    def refuse(self, why: str) -> None:
        """End the stream because this actor cannot play for this learner."""
        self._ended_by = Unfit(why)
        self._put(self._ended_by)

    def fail(self, text: str) -> None:
        """Send the learner the traceback of environments that failed, and end the stream."""
        self._ended_by = SessionOver("The environments failed.")
        self._put(encode_actor_failure(text))
        self._put(self._ended_by)

    def _put(self, message: bytes | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    # Called in the link's event loop.

    async def receive(self, call: Any) -> None:
        import grpc.aio

        while (data := await call.read()) is not grpc.aio.EOF:
            message = decode_learner_message(data)
            with self._changed:
                if message.WhichOneof("message") == "taken":
                    if self.num_untaken == 0:
                        raise invalid("A Taken must answer a rollout, got one more than were sent.")
                    self.version_at_taken = message.taken.newest
                    self.newest = max(self.newest, message.taken.newest)
                    self.num_untaken -= 1
                else:
                    self.newest = max(self.newest, message.weights.newest)
                    whole = self._assembly.add(message.weights)
                    if whole is not None:
                        self.weights, self._is_asking = whole, False
                self._changed.notify_all()
        raise self._ended_by or LearnerGone("It closed the stream.")

    async def transmit(self, call: Any) -> None:
        while True:
            message = await self._outgoing.get()
            if isinstance(message, Exception):
                # `receive` must keep reading: grpc drops written messages if a read is cancelled.
                await finish_writing(call)
                await asyncio.sleep(FLUSH_S)  # cut short if the learner ends the stream
                raise message
            await call.write(message)

    def end(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


class ActorLink:
    """Keeps a session with a learner open, in a thread of its own, until it is stopped."""

    def __init__(
        self,
        hello: Hello,
        address: str,
        security: Security | None = None,
        weights_dtype: str = "float32",
    ) -> None:
        self._security = security or Security()
        self._security.check_dialing(address)
        self._hello = hello
        self._address = address
        self._weights_dtype = weights_dtype
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._is_stopped = False
        self._stop: Callable[[], object] = lambda: None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="learner-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def next_session(self, tick: Callable[[], None]) -> Session:
        """Wait until the learner has welcomed a new stream, and return its session.

        Raise `SessionOver` once the link is stopped, or the error that ended its thread.
        """
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._is_stopped:
                    raise SessionOver
                if self._session is not None and not self._session.is_over:
                    return self._session
                tick()
                self._changed.wait(TICK_S)

    def stop(self) -> None:
        """Stop the session and the link's thread; safe in any thread and in a signal handler."""
        self._is_stopped = True
        session = self._session
        if session is not None:
            session.is_over = True  # no lock: a signal handler may interrupt the lock's owner
        self._stop()

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _work(self) -> None:
        try:
            grpc_loops.run(self._run())
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._is_stopped = True
                self._changed.notify_all()

    async def _run(self) -> None:
        from libtorchbeast.rpc.grpc_streams import Watched, watch

        streams: set[Watched] = set()
        stopped, self._stop = grpc_loops.stop_event()
        if not self._is_stopped:
            await first_of(
                stopped.wait(), watch(streams, lambda: None), self._keep_dialing(streams)
            )

    async def _keep_dialing(self, streams: set[Any]) -> None:
        """Play on one stream after the other; return when this end's environments have failed."""
        redial = Redial(self._address, "this actor", RepeatFilter())
        async with kept_connections() as kept:
            while True:
                try:
                    await self._play(streams, kept, redial)
                except SessionOver:
                    return
                except NO_LINK as error:
                    self._session = None
                    if isinstance(error, Refused) and error.code == "UNIMPLEMENTED":
                        error = Refused(error.code, OLD_LEARNER)
                    await asyncio.sleep(redial.pause_after(error))

    async def _play(self, streams: set[Any], kept: list[Any], redial: Redial) -> None:
        token = token_now(self._security)
        first = encode_actor_hello(self._hello, self._weights_dtype)
        address, security = self._address, self._security
        dialled = dial_call(ACTOR_METHOD, address, security, token, first, streams, kept)
        async with dialled as (call, data, _):
            welcome = decode_welcome(data, self._hello)
            try:
                check_fit(welcome.spec, self._hello.spec)
            except Refused as error:
                raise Unfit(str(error)) from error
            redial.succeeded()
            session = Session(welcome, self._changed)
            with self._changed:
                self._session = session
                self._changed.notify_all()
            try:
                await first_of(session.receive(call), session.transmit(call))
            finally:
                session.end()
