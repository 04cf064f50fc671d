"""Environments that listen: a learner dials, and each of its streams gets environments of its own.

One event loop serves all streams and steps their environments in turn, as a worker does: while one
group steps, grpc's own threads move the others' messages. With a thread for each stream the server
was a tenth slower, for the interpreter lock that they took from each other.

grpc is imported where it is used: `Server` may be made before a fork and run after it.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from libtorchbeast.environments import Environments
from libtorchbeast.rpc.exchange import exchange
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    Hello,
    Refused,
    decode_greeting,
    encode_failure,
    encode_hello,
    status_text,
)
from libtorchbeast.rpc.security import (
    ConnectionRate,
    Limits,
    Security,
    Strangers,
    check_token,
    server_options,
)
from libtorchbeast.rpc.single import SingleEnv, without_truncation
from libtorchbeast.rpc.steps import ActionsReader, encode_step
from libtorchbeast.specs import ArraySpec, Spec, spec_of

MAX_STREAMS = 64  # each has environments of its own
ANSWER_S = 600.0  # until the learner must have answered: it may be held up for a while
LAST_WORDS_S = 2.0
STOP_S = 1.0

MakeEnvironments = Callable[[bool], Environments]


class EnvironmentServer:
    """Serves groups of environments until it is stopped; `Server` is the one for single ones."""

    def __init__(
        self,
        make_environments: MakeEnvironments,
        server_address: str,
        name: str = "environments",
        security: Security | None = None,
        limits: Limits | None = None,
        num_streams: int = 1,
    ) -> None:
        """`make_environments(knows_truncation)` makes a group for a stream.

        The learner is asked for `num_streams` at once: while the agent thinks about one group, the
        others step.
        """
        self._make_environments = make_environments
        self._name = name
        self._num_streams = num_streams
        self._security = security or Security()
        self._limits = limits or Limits(max_streams=MAX_STREAMS)
        self._is_stopped = False
        self._wake: Callable[[], object] = lambda: None
        self._security.check_listening(server_address)
        self.server_address = server_address

    def run(self, on_listening: Callable[[str], None] | None = None) -> None:
        """Serve until `stop()`. OSError with one sentence if the address cannot be had."""
        asyncio.run(self._run(on_listening))

    def stop(self) -> None:
        """Let `run()` return; from any thread, also before it was called."""
        self._is_stopped = True
        self._wake()

    async def _run(self, on_listening: Callable[[str], None] | None) -> None:
        import grpc.aio

        self._rate = ConnectionRate(self._limits)
        self._strangers = Strangers(self._limits)
        self._num_playing = 0
        self._token = self._security.read_token()
        server = grpc.aio.server(
            options=server_options(self._limits),
            maximum_concurrent_rpcs=2 * self._limits.max_streams,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        service, method = ENVIRONMENTS_METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.server_address = self._security.add_port(server, self.server_address)
        await server.start()
        try:
            if on_listening is not None:
                on_listening(self.server_address)
            await self._until_stopped()
        finally:
            await server.stop(STOP_S)

    async def _until_stopped(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(stopped.set)
        if not self._is_stopped:  # looked at after `_wake` is there: no call of stop() is missed
            await stopped.wait()
        self._wake = lambda: None

    async def _play(self, requests: Any, context: Any) -> None:
        """One stream."""
        import grpc.aio

        try:
            self._rate.take(context.peer())
            with self._strangers.meet(context.peer()):
                data = await self._first_message(context)
                if data is grpc.aio.EOF:
                    return  # the learner left without a word
                greeting = decode_greeting(data)
                check_token(self._token, greeting.token)
            with self._place():
                await self._serve(context, greeting.knows_truncation)
        except Refused as error:
            await context.abort(grpc.StatusCode[error.code], status_text(str(error)))
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            pass  # the learner left
        except Exception as error:
            with contextlib.suppress(grpc.aio.BaseError, TimeoutError):  # nobody may be there
                async with asyncio.timeout(LAST_WORDS_S):
                    await context.write(encode_failure(traceback.format_exc()))
            text = f"{type(error).__name__}: {error}"
            await context.abort(grpc.StatusCode.UNKNOWN, status_text(text))

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of the streams that may be open at once."""
        if self._num_playing >= self._limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"These environments take {self._limits.max_streams} streams, and all are in use.",
            )
        self._num_playing += 1
        try:
            yield
        finally:
            self._num_playing -= 1

    async def _first_message(self, context: Any) -> Any:
        try:
            async with asyncio.timeout(self._limits.handshake_s):
                return await context.read()
        except TimeoutError:
            text = "The other end has not introduced itself in time."
            raise Refused("DEADLINE_EXCEEDED", text) from None

    async def _serve(self, context: Any, knows_truncation: bool) -> None:
        import grpc.aio

        with contextlib.closing(self._make_environments(knows_truncation)) as environments:
            row = environments.reset()
            hello = introduce(environments, row, self._name, num_streams=self._num_streams)
            await context.write(encode_hello(hello))
            actions = ActionsReader(hello.spec, hello.num_envs)
            while True:
                data = await self._answer(context, encode_step(row))
                if data is grpc.aio.EOF:
                    return
                row = environments.step(actions.read(data))
                if not knows_truncation:
                    row = without_truncation(row)

    async def _answer(self, context: Any, data: bytes) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await exchange(context.read, context.write, data)
        except TimeoutError:
            text = f"The learner has not answered within {ANSWER_S:.0f} s."
            raise Refused("DEADLINE_EXCEEDED", text) from None


class Server(EnvironmentServer):
    """Serves environments made by `env_class()`, one for each stream."""

    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str = "unix:/tmp/polybeast",
        security: Security | None = None,
    ) -> None:
        """The environments may be old Gym's or Gymnasium's; observations may be nests of arrays.

        The address is `unix:/path` or `host:port`; other machines need `security`.
        """
        name = getattr(env_class, "__name__", "environment")
        super().__init__(
            lambda knows_truncation: SingleEnv(env_class(), knows_truncation),
            server_address,
            name,
            security,
        )


def introduce(
    environments: Environments,
    row: dict[str, Any],
    name: str,
    token: str = "",
    num_streams: int = 1,
) -> Hello:
    """What environments say of themselves, seen from their first row."""
    action = getattr(environments, "action_spec", ArraySpec("int64"))
    return Hello(
        name=name,
        num_envs=environments.num_envs,
        spec=Spec(spec_of(row["frame"]), action),
        num_actions=int(getattr(environments, "num_actions", 0) or 0),
        token=token,
        num_streams=num_streams,
    )
