"""Connections from environments, actors and simulators to a learner that listens.

    dial_lane    gets a lane from a learner on this machine (in a `LaneScheduler`)
    dial_stream  opens a gRPC stream of environments (in asyncio)
    dial_call    opens any gRPC call of a learner (in asyncio)
    Redial       when to dial again, and what the log says meanwhile

gRPC is not imported before a call is made.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from libtorchbeast.env_host import BadAnswer
from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.lane_scheduler import LaneLink, next_message
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rpc.address import Address, dial_unix, is_ours
from libtorchbeast.rpc.handshake import (
    FINISHED,
    Greeting,
    Hello,
    Refused,
    greeting_from_json,
    refusal_from_json,
)
from libtorchbeast.rpc.lane_receipt import receive_lane
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import LaneClosed
from libtorchbeast.supervisor import FULL_JITTER, BackOff
from libtorchbeast.text import printable

logger = logging.getLogger("torchbeast")

HANDSHAKE_S = 150.0  # for the learner's first message: it may be building its model
ACTION_S = 600.0  # for the actions of a step: the learner may be held up for a while
FLUSH_S = 2.0  # for the last messages to be sent
REASON_S = 1.0  # for a learner that closed a lane to say why
STOP_S = 1.0  # for a broken call to report its status
REFUSED_S, MAX_REFUSED_S = 5.0, 60.0  # first and longest pause after a refusal


class LearnerGone(Exception):
    """The connection is lost, or there is none yet; dial again."""

    def __init__(self, text: str = "", retry_s: float | None = None, code: str = "") -> None:
        """`retry_s`: when to dial again, if the learner said so in a status with this `code`."""
        super().__init__(text)
        self.retry_s = retry_s
        self.is_too_early = retry_s is not None and code == "RESOURCE_EXHAUSTED"


class NotReady(Exception):
    """This end's own token or certificate cannot be used now, perhaps while it is replaced."""


class Unfit(BadAnswer):
    """The learner's specs or model do not fit this end."""


class LearnerFinished(LearnerGone):
    """Training is finished: this learner takes no more steps."""


class LanesImpossible(Exception):
    """The learner at this unix socket hands over no lanes; use gRPC."""


NO_LINK = (LearnerGone, Refused, BadAnswer, NotReady)
"""Errors after which environments wait and dial again."""


class Redial:
    """Decides when to dial the learner again, and logs why there is no link meanwhile."""

    def __init__(self, address: str, who: str, repeats: RepeatFilter) -> None:
        """`who` names this end in the log; `repeats` limits how often a text is logged."""
        self._address = address
        self._who = who
        self._repeats = repeats
        self._back_off = dialing_back_off()
        self._refusals = BackOff(REFUSED_S, MAX_REFUSED_S)

    def succeeded(self) -> None:
        """Log that there is a link, and reset the pauses, except those after refusals."""
        self._log(f"Playing with the learner at {self._address}.")
        self._back_off.reset()

    def pause_after(self, error: Exception) -> float:
        """Log why there is no link, and return the seconds to wait before the next call."""
        why = str(error).rstrip(".")
        if isinstance(error, LearnerGone):
            self._log(f"No learner at {self._address}: {why}. Dialing again.")
            return pause_of(error, self._back_off)
        what = f"The learner at {self._address} refused {self._who}"
        if isinstance(error, Unfit):
            what = f"The learner at {self._address} does not fit {self._who}"
        elif isinstance(error, BadAnswer):
            what = f"The learner at {self._address} sent an invalid message"
        elif isinstance(error, NotReady):
            what = f"{self._who.capitalize()} cannot dial {self._address}"
        self._log(f"{what}: {why}. Trying again, with growing pauses.", logging.WARNING)
        return self._refusals.next_s()

    def _log(self, text: str, level: int = logging.INFO) -> None:
        shown = self._repeats.take(text)
        if shown is not None:
            logger.log(level, "%s", shown)


def token_now(security: Security) -> str:
    """Return the current token, which may be replaced between calls; raise `NotReady`."""
    try:
        return security.read_token()
    except ValueError as error:
        raise NotReady(str(error)) from error


async def dial_lane(address: str, hello: Hello) -> tuple[JsonSocket, LaneLink, Greeting]:
    """Introduce environments to a learner on this machine, and wait for a lane.

    Runs in a `LaneScheduler`. Raise `LearnerGone`, `Refused`, `BadAnswer` or `LanesImpossible`.
    The caller closes the connection after use.
    """
    try:
        connection = JsonSocket(dial_unix(Address.parse(address).path))
    except OSError as error:
        raise LearnerGone(str(error)) from error
    try:
        connection.send("hello", **hello.to_json())
        message = await next_message(connection, HANDSHAKE_S)
        if message["kind"] == "refused":
            raise refusal_from_json(message)
        greeting = understood(message)
        link = await receive_lane(connection, hello, HANDSHAKE_S)
        if link is None:
            raise LanesImpossible("The descriptor was lost.")
        return connection, link, greeting
    except BaseException as error:
        connection.close()
        if isinstance(error, UnknownProtocol):
            raise LanesImpossible(str(error)) from error
        if isinstance(error, (EOFError, OSError, LaneClosed)):
            raise LearnerGone(str(error) or "It closed the connection.") from error
        if isinstance(error, Refused):
            raise meaning_of(error) from error
        raise


def meaning_of(refused: Refused) -> Refused | LearnerGone:
    """Return a refusal, or `LearnerGone` in its place if dialing again may be enough."""
    if refused.code in Refused.PERMANENT:
        return refused
    kind = LearnerFinished if refused.code == FINISHED else LearnerGone
    return kind(str(refused), refused.retry_s, refused.code)


def dialing_back_off() -> BackOff:
    """Return a back-off with full jitter, as many clients may lose a learner at the same moment."""
    return BackOff(jitter=FULL_JITTER)


def pause_of(error: Exception, back_off: BackOff) -> float:
    """Return the next pause of the back-off, or a longer one if the learner asked for it."""
    return max(back_off.next_s(), getattr(error, "retry_s", None) or 0.0)


async def why_closed(link: LaneLink, connection: Any) -> Refused | LearnerGone:
    """Return why the learner closed a lane, if it says so soon. Runs in a `LaneScheduler`."""
    message = link.message
    if message is None:
        with contextlib.suppress(EOFError, OSError, UnknownProtocol):
            message = await next_message(connection, REASON_S)
    if message is None or message["kind"] != "refused":
        return LearnerGone("It closed the lane.")
    return meaning_of(refusal_from_json(message))


def understood(message: dict[str, Any]) -> Greeting:
    """Return the Greeting in a message; raise `BadAnswer` if invalid or of another version."""
    try:
        return greeting_from_json(message)
    except Refused as error:
        raise BadAnswer(str(error)) from error


@contextlib.asynccontextmanager
async def dial_stream(
    address: str,
    security: Security,
    hello: Hello,
    streams: set[Any],
    kept: list[Any] | None = None,
) -> AsyncIterator[Any]:
    """Open a gRPC stream of environments to a learner: yields (call, link, greeting).

    `dial_call` has the errors, and the meaning of `kept`.
    """
    import grpc.aio

    from libtorchbeast.rpc.grpc_streams import StreamLink, exchange
    from libtorchbeast.rpc.messages import LEARNER_METHOD, decode_greeting, encode_hello

    first = encode_hello(hello)
    dialled = dial_call(LEARNER_METHOD, address, security, hello.token, first, streams, kept)
    async with dialled as (call, data, stream):

        async def show(data: bytes) -> bytes:
            data = await exchange(call, data)
            if data is grpc.aio.EOF:
                raise LearnerGone("The learner closed the stream.")
            return data

        link = StreamLink(hello, show, stream, ACTION_S)
        yield call, link, decode_greeting(data)


@contextlib.asynccontextmanager
async def dial_call(
    method: tuple[str, str],
    address: str,
    security: Security,
    token: str,
    first: bytes,
    streams: set[Any],
    kept: list[Any] | None = None,
) -> AsyncIterator[Any]:
    """Call a learner, send a `first` message, and yield (call, answer, stream). For asyncio.

    Raise one of `NO_LINK`, also while the call is in use. If the learner asks this end to dial
    again later, the connection is put into `kept`, from which the next call takes it: another TLS
    handshake would cost both ends more than the call.
    """
    import grpc
    import grpc.aio

    from libtorchbeast.rpc.grpc_streams import ANSWER, exchange, watched
    from libtorchbeast.rpc.messages import token_metadata

    check_owner(address)
    try:
        channel = kept.pop() if kept else security.aio_channel(address, Limits())
    except ValueError as error:
        raise NotReady(str(error)) from error
    call: Any = None
    is_kept = False
    try:
        async with watched(streams, address) as stream:
            metadata = token_metadata(token)
            call = channel.stream_stream("/" + "/".join(method))(metadata=metadata)
            stream.expect(ANSWER, HANDSHAKE_S)
            await call.wait_for_connection()
            # In one operation: a failed `write` would hide the status of an early refusal.
            data = await exchange(call, first)
            if data is grpc.aio.EOF:
                raise LearnerGone("It closed the stream.")
            stream.has_done(ANSWER)
            yield call, data, stream
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        is_status = isinstance(error, grpc.aio.AioRpcError)
        ended = end_of_call(error if is_status else await status_of(call))
        is_kept = kept is not None and getattr(ended, "is_too_early", False)
        raise ended from error
    except Refused as error:  # raised by this end: the learner broke a rule, or was too slow
        if error.code in Refused.PERMANENT:
            raise BadAnswer(str(error)) from error
        raise LearnerGone(str(error)) from error
    finally:
        if is_kept:
            assert kept is not None
            kept.append(channel)
        else:
            await channel.close()


async def status_of(call: Any) -> Any:
    """Return a call's status (code, details, metadata), or None if it does not end soon."""
    try:
        async with asyncio.timeout(STOP_S):
            return await call.code(), await call.details(), await call.trailing_metadata()
    except TimeoutError:
        return None


def end_of_call(error: Any) -> Exception:
    """Return the exception that a call's status (`AioRpcError`, tuple or None) stands for."""
    if error is None:
        return LearnerGone("The connection was lost.")
    from libtorchbeast.rpc.messages import retry_s_in

    if not isinstance(error, tuple):
        error = error.code(), error.details(), error.trailing_metadata()
    code, details, metadata = error
    if code.name == "INTERNAL":  # grpc's status for a stream that the peer ends during a write
        return LearnerGone(
            "It ended the stream at once; it may be ending or have no place left, or the tokens "
            "differ: give both ends the same --token_file."
        )
    text = printable(details or code.name)
    return meaning_of(Refused(code.name, text, retry_s_in(metadata)))


@contextlib.asynccontextmanager
async def kept_connections() -> AsyncIterator[list[Any]]:
    """Yield a list for `dial_call` to keep connections in, and close these at the end."""
    kept: list[Any] = []
    try:
        yield kept
    finally:
        for channel in kept:
            await channel.close()


async def finish_writing(call: Any, last: bytes = b"") -> None:
    """Send the `last` message, if any, and end writing; ignore it if the connection is broken."""
    import grpc.aio

    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            if last:
                await call.write(last)
            await call.done_writing()


def check_owner(address: str) -> None:
    """Raise `LearnerGone` for another user's unix socket, which must not get our token."""
    path = Address.parse(address).path
    with contextlib.suppress(FileNotFoundError):
        if path and not is_ours(path):
            raise LearnerGone(
                f"The socket {path} belongs to another user, so it is not dialled; name another."
            )
