"""The part of a gateway that listens: for gRPC streams, and at unix sockets also for hosts."""

import asyncio
import contextlib
import functools
import os
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc._cython.cygrpc import ExecuteBatchError

from libtorchbeast.json_socket import UnknownProtocol
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rpc.actor_messages import decode_actor_hello
from libtorchbeast.rpc.address import Address, listen_unix, speaks_http2
from libtorchbeast.rpc.certificates import CallerCheck
from libtorchbeast.rpc.gateway_config import GatewayConfig
from libtorchbeast.rpc.gateway_streams import carry_rollouts, carry_steps
from libtorchbeast.rpc.grpc_relay import private_address, relay
from libtorchbeast.rpc.grpc_streams import INTRODUCE, READ, STEP, Watched, watched
from libtorchbeast.rpc.handshake import EnvironmentFailed, Refused, hello_from_json, status_text
from libtorchbeast.rpc.lane_handover import Host, hand_over, until_readable
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.rpc.limits import Admission, server_options
from libtorchbeast.rpc.messages import (
    ACTOR_METHOD,
    LEARNER_METHOD,
    decode_hello,
    encode_greeting,
    retry_metadata,
    token_in,
)
from libtorchbeast.text import printable_lines

AGAIN_S = 0.5  # before another try to accept, or to listen
MAX_UNAUTHENTICATED_TEXTS = 10  # a minute in the log, of peers that have not shown a token
# A client that is refused while it writes its first message does not see the status, so a refusal
# waits for a moment. Few may wait at a time, as their messages fill grpc's buffers meanwhile.
REFUSAL_S, MAX_REFUSING = 0.02, 16
STOP_S = 1.0  # for streams to end with their server
CHECK_SERVER_S = 0.05  # between two checks that grpc still listens


@dataclass(frozen=True)
class _Server:
    """A server of grpc.aio, and its open calls."""

    server: Any
    address: str  # with its port
    calls: set[Any]


_Play = Callable[[Watched, Any], Awaitable[None]]
_Decode = Callable[[bytes, int], Any]
ENVIRONMENTS, ACTOR = "Environments were", "An actor was"  # in the log, before "refused"


class Listener:
    """Accepts the environments and actors that dial a gateway."""

    def __init__(
        self, config: GatewayConfig, learner: LearnerConnection, streams: set[Watched]
    ) -> None:
        """Open streams are kept in `streams`."""
        self._config = config
        self._learner = learner
        self._streams = streams
        self._security = config.security
        self._limits = config.limits
        self._admission = Admission(self._limits)
        self._check_caller = CallerCheck(self._security, is_learner_expected=False)
        self._refusing = asyncio.Semaphore(MAX_REFUSING)
        self._unauthenticated_texts = RepeatFilter(MAX_UNAUTHENTICATED_TEXTS)

    def end_revoked(self) -> None:
        """End streams whose certificate has been revoked."""
        self._check_caller.end_revoked(self._streams)

    @contextlib.asynccontextmanager
    async def listen(self, address: str) -> AsyncIterator[str]:
        """Listen at an address; yield it with its actual port."""
        if not Address.parse(address).path:
            async with self._listen_for_streams(address) as bound:
                yield bound
            return
        self._security.check_listening(address)
        with private_address() as behind:
            async with self._listen_for_streams(behind):
                listener = listen_unix(address)
                task = asyncio.create_task(self._accept(listener, behind))
                try:
                    yield address
                finally:
                    task.cancel()
                    listener.close()
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(Address.parse(address).path)

    @contextlib.asynccontextmanager
    async def _listen_for_streams(self, address: str) -> AsyncIterator[str]:
        first = await self._start_server(address)
        task = asyncio.create_task(self._keep_listening(first))
        try:
            yield first.address
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._until_streams_end()

    async def _start_server(self, address: str) -> _Server:
        server = grpc.aio.server(options=server_options(self._limits, self._config.share_port))
        calls: set[Any] = set()

        def handler(play: _Play, who: str) -> Any:
            async def serve(requests: Any, context: Any) -> None:
                calls.add(context)
                try:
                    await self._serve(context, play, who)
                finally:
                    calls.discard(context)

            return grpc.stream_stream_rpc_method_handler(serve)

        service, play = LEARNER_METHOD
        _, act = ACTOR_METHOD
        handlers = {play: handler(self._play, ENVIRONMENTS), act: handler(self._act, ACTOR)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        bound = self._security.add_port(server, address)
        await server.start()
        return _Server(server, bound, calls)

    async def _keep_listening(self, current: _Server) -> None:
        """Start another server whenever the current one stops listening, until cancelled.

        A request whose path is not UTF-8 stops a server of grpc.aio: it serves its open calls and
        accepts no more.
        """
        stopped: list[_Server] = []
        try:
            while True:
                await asyncio.sleep(CHECK_SERVER_S)
                if not current.server._server.is_running():
                    stopped = [server for server in [*stopped, current] if server.calls]
                    text = "grpc stopped listening after a bad request; the gateway listens again."
                    self._learner.report(text, current.address)
                    current = await self._start_again(current.address)
        finally:
            if current.server._server.is_running():  # a stopped one cannot be stopped again
                await current.server.stop(STOP_S)

    async def _start_again(self, address: str) -> _Server:
        while True:
            try:
                return await self._start_server(address)
            except (OSError, ValueError, RuntimeError) as error:
                self._learner.report(f"The gateway cannot listen again yet: {error}", address)
                await asyncio.sleep(AGAIN_S)

    async def _until_streams_end(self) -> None:
        """Wait for open streams, as nothing else waits for those of servers that had stopped."""
        deadline = time.monotonic() + STOP_S
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_SERVER_S)

    async def _accept(self, listener: socket.socket, behind: str) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # the client has left, or no file descriptor is free
                await asyncio.sleep(AGAIN_S)
                continue
            task = asyncio.create_task(self._welcome(connection, behind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _welcome(self, connection: socket.socket, behind: str) -> None:
        """Serve a client at a unix socket: a host on this machine, or one that speaks gRPC."""
        try:
            await until_readable(connection, self._limits.handshake_s)
            if speaks_http2(connection):
                await relay(connection, behind)
                return
        except OSError:
            connection.close()
            return
        host = Host(connection)
        try:
            await self._serve_host(host)
        finally:
            host.close()

    async def _serve_host(self, host: Host) -> None:
        """Serve a host on this machine that dialled in: hand a lane over to it."""

        def check_token(token: str) -> None:
            self._check_caller(token, {})

        async def serve(stream: Watched) -> None:
            self._admission.count(stream)
            with self._admission.introduction(stream):
                message = await host.next(self._limits.handshake_s)
                if message is None or message["kind"] != "hello":
                    return
                hello = hello_from_json(message, self._limits.max_message_bytes, check_token)
            stream.is_authenticated = True
            with self._admission.play():
                host.send("greeting", **self._config.greeting().to(hello).to_json())
                await hand_over(stream, hello, host, self._learner)

        refusal = await self._guard("unix:", serve, ENVIRONMENTS)
        if refusal is not None:
            with contextlib.suppress(EOFError):
                host.send("refused", **refusal.to_json())

    async def _serve(self, context: Any, play: _Play, who: str) -> None:
        """Serve a gRPC stream of a client that dialled in."""

        async def serve(stream: Watched) -> None:
            self._admission.count(stream)
            # Before anything is read: messages that are not read stay in the sender's memory.
            token = token_in(context.invocation_metadata())
            try:
                stream.certified_name = self._check_caller(token, context.auth_context())
            except Refused:
                if not self._refusing.locked():
                    async with self._refusing:
                        await asyncio.sleep(REFUSAL_S)
                raise
            await play(stream, context)

        refusal = await self._guard(context.peer(), serve, who)
        if refusal is not None:
            text, metadata = status_text(str(refusal)), retry_metadata(refusal)
            await context.abort(grpc.StatusCode[refusal.code], text, metadata)

    async def _play(self, stream: Watched, context: Any) -> None:
        """Play with environments that dialled in."""
        hello = await self._introduction(stream, context, decode_hello)

        async def exchange(data: bytes) -> Any:
            stream.expect(READ, self._limits.write_s)
            await context.write(data)
            stream.has_done(READ)
            stream.expect(STEP, self._limits.step_s)
            return await context.read()

        with self._admission.play():
            greeting = encode_greeting(self._config.greeting().to(hello))
            accept = functools.partial(context.write, greeting)
            await carry_steps(self._learner, stream, hello, context.read, exchange, accept)

    async def _act(self, stream: Watched, context: Any) -> None:
        """Take rollouts from an actor that carries the model."""
        hello, dtype = await self._introduction(stream, context, decode_actor_hello)
        greeting = self._config.greeting().to(hello)
        with self._admission.play():
            await carry_rollouts(
                self._learner, stream, hello, dtype, greeting, context.read, context.write
            )

    async def _introduction(self, stream: Watched, context: Any, decode: _Decode) -> Any:
        """Read and decode a stream's first message; raise EOFError if the client leaves first."""
        has_token = self._check_caller.knows_token
        with self._admission.introduction(stream, has_token=has_token):
            data = await context.read()
            if data is grpc.aio.EOF:
                raise EOFError
            said = decode(data, self._limits.max_message_bytes)
        stream.is_authenticated = True
        return said

    async def _guard(
        self, peer: str, serve: Callable[[Watched], Awaitable[None]], who: str
    ) -> Refused | None:
        """Serve a client that dialled in; return the refusal to send to it, if it is refused.

        All other errors are reported to the learner.
        """
        stream: Watched | None = None
        try:
            async with watched(self._streams, peer) as stream:
                stream.expect(INTRODUCE, self._limits.handshake_s)
                if self._learner.stopped.is_set():
                    raise self._learner.ending()
                await serve(stream)
        except Refused as error:
            if stream is not None:
                self._learner.clients.count_refusal(stream, error)
            is_authenticated = stream is not None and stream.is_authenticated
            self._report_refusal(f"{who} refused", error, peer, is_authenticated)
            # A new one, as the traceback of the raised one keeps the client's message in memory.
            return Refused(error.code, str(error), error.retry_s)
        except EnvironmentFailed as error:
            self._learner.report(printable_lines(str(error)), peer, "environment_failed")
        except (EOFError, UnknownProtocol, ExecuteBatchError):
            pass  # the other end is gone
        except Exception:
            self._learner.report(traceback.format_exc(), peer)
            return Refused(
                "INTERNAL", "The gateway failed with an internal error; see the learner's log."
            )
        return None

    def _report_refusal(self, what: str, error: Refused, peer: str, is_authenticated: bool) -> None:
        texts = None if is_authenticated else self._unauthenticated_texts
        if error.code != "UNAVAILABLE":
            self._learner.report(f"{what}: {error}", peer, texts=texts)
