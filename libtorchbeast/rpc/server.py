"""Environments that listen: a learner dials, and each of its streams gets environments of its own.

grpc is imported where it is used: `Server` may be made before a fork and run after it.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    check_token,
    server_options,
)
from libtorchbeast.rpc.single import Environments, SingleEnv, without_truncation
from libtorchbeast.rpc.steps import ActionsReader, encode_step
from libtorchbeast.specs import ArraySpec, Spec, spec_of

MAX_STREAMS = 64  # each has environments and a thread of its own
STOP_S = 1.0
WATCH_S = 0.5

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
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._greeting_since: dict[Any, float] = {}  # streams whose learner has not yet spoken
        self._security.check_listening(server_address)
        self.server_address = server_address

    def run(self, on_listening: Callable[[str], None] | None = None) -> None:
        """Serve until `stop()`. OSError with one sentence if the address cannot be had."""
        import grpc

        self._rate = ConnectionRate(self._limits)
        self._token = self._security.read_token()
        executor = ThreadPoolExecutor(self._limits.max_streams, thread_name_prefix="stream")
        server = grpc.server(
            executor,
            options=server_options(self._limits),
            maximum_concurrent_rpcs=self._limits.max_streams,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        service, method = ENVIRONMENTS_METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.server_address = self._security.add_port(server, self.server_address)
        server.start()
        try:
            if on_listening is not None:
                on_listening(self.server_address)
            while not self._stopped.wait(WATCH_S):
                self._end_silent_streams()
        finally:
            server.stop(STOP_S).wait(2 * STOP_S)
            executor.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Let `run()` return; from any thread, also before it was called."""
        self._stopped.set()

    def _end_silent_streams(self) -> None:
        deadline = time.monotonic() - self._limits.handshake_s
        with self._lock:
            silent = [c for c, since in self._greeting_since.items() if since < deadline]
        for context in silent:
            context.cancel()

    def _play(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One stream, in a thread of its own."""
        import grpc

        try:
            self._rate.take(context.peer())
            knows_truncation = self._greet(requests, context)
            if knows_truncation is None:
                return
            yield from self._serve(requests, knows_truncation)
        except Refused as error:
            context.abort(grpc.StatusCode[error.code], status_text(str(error)))
        except Exception as error:
            if not context.is_active():
                return  # the learner left
            yield encode_failure(traceback.format_exc())
            text = f"{type(error).__name__}: {error}"
            context.abort(grpc.StatusCode.UNKNOWN, status_text(text))

    def _greet(self, requests: Iterator[bytes], context: Any) -> bool | None:
        """Whether the learner knows truncation; None if it left without a word."""
        with self._lock:
            self._greeting_since[context] = time.monotonic()
        try:
            data = next(requests, None)
        finally:
            with self._lock:
                del self._greeting_since[context]
        if data is None:
            return None
        greeting = decode_greeting(data)
        check_token(self._token, greeting.token)
        return greeting.knows_truncation

    def _serve(self, requests: Iterator[bytes], knows_truncation: bool) -> Iterator[bytes]:
        environments = self._make_environments(knows_truncation)
        try:
            row = environments.reset()
            hello = introduce(environments, row, self._name, num_streams=self._num_streams)
            yield encode_hello(hello)
            yield encode_step(row)
            actions = ActionsReader(hello.spec, hello.num_envs)
            for data in requests:
                row = environments.step(actions.read(data))
                yield encode_step(row if knows_truncation else without_truncation(row))
        finally:
            environments.close()


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
