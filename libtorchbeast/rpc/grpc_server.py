"""Environments that listen for gRPC: one thread steps all groups in turn.

While one group steps, grpc's own threads move the messages of the others. With a thread for each
stream the server was a tenth slower, as the threads competed for the interpreter lock.
"""

import logging
import threading
import traceback
from collections.abc import Callable

from libtorchbeast.env_host import BadAnswer, play
from libtorchbeast.groups import Group
from libtorchbeast.rpc.certificates import CallerCheck
from libtorchbeast.rpc.env_server import Groups
from libtorchbeast.rpc.grpc_calls import Call, CallServer, LinkLost
from libtorchbeast.rpc.grpc_streams import (
    INTRODUCE,
    READ_GREETING,
    READ_STATUS,
    StreamLink,
    Watched,
)
from libtorchbeast.rpc.handshake import Hello, Refused, status_text
from libtorchbeast.rpc.limits import Admission, Limits, server_options
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    decode_greeting,
    encode_failure,
    encode_hello,
    token_in,
)
from libtorchbeast.rpc.security import Security
from libtorchbeast.text import encodable

logger = logging.getLogger("torchbeast")

ANSWER_S = 600.0  # for the actions of a step: the learner may be held up for a while
STATUS_S = 2.0  # for the other end to read how the stream ended


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
        self._check_caller = CallerCheck(security, is_learner_expected=True)
        self._streams: set[Watched] = set()
        self._is_stopped = False
        self.is_listening = threading.Event()

    def run(self, address: str, on_listening: Callable[[str], None] = lambda address: None) -> None:
        server = CallServer(self._play, server_options(self._limits))
        bound = self._security.add_port(server, address)
        server.start()
        try:
            on_listening(bound)
            self.is_listening.set()
            server.run(lambda: self._is_stopped, self._look)
        finally:
            server.stop()

    def stop(self) -> None:
        """Make `run()` return; any thread may call this."""
        self._is_stopped = True

    def _look(self) -> None:
        """Call `tick`, and end streams that missed a deadline or whose certificate is revoked."""
        self._tick()
        for stream in list(self._streams):
            stream.check()
        self._check_caller.end_revoked(self._streams)

    async def _play(self, call: Call) -> None:
        """Serve one stream, and end it with a status."""
        stream = Watched(call.peer, call.cancel)
        self._streams.add(stream)
        try:
            code, text = await self._serve(stream, call)
            stream.expect(READ_STATUS, STATUS_S)
            await call.finish(code, status_text(text))
        except LinkLost:
            pass  # the other end is gone
        finally:
            self._streams.discard(stream)

    async def _serve(self, stream: Watched, call: Call) -> tuple[str, str]:
        """Play with the learner that dialled; return the code and text of the stream's status."""
        try:
            if call.method != "/" + "/".join(ENVIRONMENTS_METHOD):
                raise Refused("UNIMPLEMENTED", "This end serves Environments.Play of env.proto.")
            await self._introduce_and_play(stream, call)
        except Refused as error:
            return error.code, str(error)
        except BadAnswer as error:
            return "INVALID_ARGUMENT", str(error)
        except LinkLost:
            pass  # the learner left
        except Exception as error:
            text = encodable("".join(traceback.format_exception(error)))
            logger.error("%s", text)
            stream.expect(READ_STATUS, STATUS_S)
            await call.write(encode_failure(text))
            return "UNKNOWN", f"{type(error).__name__}: {error}"
        return "OK", ""

    async def _introduce_and_play(self, stream: Watched, call: Call) -> None:
        stream.expect(INTRODUCE, self._limits.handshake_s)
        self._admission.count(stream)
        stream.certified_name = self._check_caller(token_in(call.metadata), call.identity)
        with self._admission.introduction(stream):
            greeting = decode_greeting(await call.read())
        stream.has_done(INTRODUCE)
        with self._admission.play(), self._groups.new(greeting.knows_truncation) as group:
            hello = self._introduce(group)
            stream.expect(READ_GREETING, self._limits.write_s)
            await call.write(encode_hello(hello))
            stream.has_done(READ_GREETING)
            link = StreamLink(hello, call.exchange, stream, ANSWER_S)
            await play(group, link, knows_truncation=greeting.knows_truncation)
