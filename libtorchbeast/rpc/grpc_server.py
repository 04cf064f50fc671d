"""Environments that listen for gRPC: one event loop steps all groups in turn.

While one group steps, grpc's own threads move the others' messages. With a thread for each stream
the server was a tenth slower, for the interpreter lock that they took from each other.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from libtorchbeast.env_host import BadAnswer, play
from libtorchbeast.environments import Group
from libtorchbeast.rpc import grpc_loops
from libtorchbeast.rpc.env_server import Groups
from libtorchbeast.rpc.grpc_relay import private_address, relay
from libtorchbeast.rpc.grpc_streams import INTRODUCE, LinkLost, StreamLink, Watched, watch, watched
from libtorchbeast.rpc.handshake import Hello, Refused, check_token, status_text
from libtorchbeast.rpc.limits import Admission, Limits, server_options
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    decode_greeting,
    encode_failure,
    encode_hello,
)
from libtorchbeast.rpc.security import Security

logger = logging.getLogger("torchbeast")

ANSWER_S = 600.0  # until the learner must have answered: it may be held up for a while
LAST_WORDS_S = 2.0
START_S = 30.0
STOP_S = 1.0


class StreamServer:
    """Serves groups of environments over gRPC until it is stopped."""

    def __init__(
        self,
        groups: Groups,
        introduce: Callable[[Group], Hello],
        security: Security,
        admission: Admission,
        limits: Limits,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._groups = groups
        self._introduce = introduce
        self._security = security
        self._limits = limits
        self._tick = tick
        self._admission = admission
        self._streams: set[Watched] = set()
        self._relays: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._is_stopped = False
        self._address = ""
        self.is_listening = threading.Event()

    def run(self, address: str, on_listening: Callable[[str], None] = lambda address: None) -> None:
        grpc_loops.run(self._run(address, on_listening))

    def stop(self) -> None:
        """Let `run()` return; from any thread."""
        self._is_stopped = True
        if self._loop is not None and self._stopped is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stopped.set)

    # For connections that were accepted elsewhere.

    def run_behind(self) -> None:
        """Serve what `take` is given."""
        with private_address() as address:
            self.run(address)

    def take(self, connection: socket.socket) -> None:
        """From any thread, when it `is_listening`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start_relay, connection)

    def _start_relay(self, connection: socket.socket) -> None:
        task = asyncio.ensure_future(relay(connection, self._address))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def _run(self, address: str, on_listening: Callable[[str], None]) -> None:
        server = grpc.aio.server(options=server_options(self._limits))
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        service, method = ENVIRONMENTS_METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self._address = self._security.add_port(server, address)
        await server.start()
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        watcher = asyncio.create_task(watch(self._streams, self._tick))
        try:
            on_listening(self._address)
            self.is_listening.set()
            if not self._is_stopped:  # looked at after the event is there
                await self._stopped.wait()
        finally:
            watcher.cancel()
            await server.stop(STOP_S)
            for task in self._relays:
                task.cancel()
            await asyncio.gather(*self._relays, return_exceptions=True)

    async def _play(self, requests: Any, context: Any) -> None:
        """One stream."""
        peer = context.peer()
        try:
            async with watched(self._streams, peer) as stream:
                with self._admission.stream(peer):
                    await self._serve(stream, context)
        except (Refused, BadAnswer) as error:
            code = error.code if isinstance(error, Refused) else "INVALID_ARGUMENT"
            await context.abort(grpc.StatusCode[code], status_text(str(error)))
        except (grpc.aio.BaseError, asyncio.InvalidStateError, LinkLost):
            pass  # the learner left
        except Exception as error:
            await self._fail(context, error)

    async def _serve(self, stream: Watched, context: Any) -> None:
        stream.expect(INTRODUCE, self._limits.handshake_s)
        with self._admission.unauthenticated(stream.peer):
            data = await context.read()
            if data is grpc.aio.EOF:
                return  # the learner left without a word
            greeting = decode_greeting(data)
            check_token(self._security.read_token(), greeting.token)
        stream.has_done(INTRODUCE)
        with self._groups.new(greeting.knows_truncation) as group:
            hello = self._introduce(group)
            await context.write(encode_hello(hello))
            link = StreamLink(hello, context.read, context.write, stream, ANSWER_S)
            await play(group, link, self._tick, greeting.knows_truncation)

    async def _fail(self, context: Any, error: Exception) -> None:
        """Tell the learner what raised; environments that it was not rebuilt for."""
        logger.error("%s", "".join(traceback.format_exception(error)))
        with contextlib.suppress(grpc.aio.BaseError, TimeoutError):  # nobody may be there
            async with asyncio.timeout(LAST_WORDS_S):
                await context.write(encode_failure("".join(traceback.format_exception(error))))
        text = f"{type(error).__name__}: {error}"
        await context.abort(grpc.StatusCode.UNKNOWN, status_text(text))
