"""How environments, actors and simulators get through to a learner that listens, and stay with it.

    dial_lane    a learner of this machine, which hands over a lane (in a `LaneScheduler`)
    dial_stream  environments, over gRPC (in asyncio); `dial_call` is any call of a learner's
    Redial       when to try again, and what the log says meanwhile

Nothing here imports gRPC before a call is made.
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

HANDSHAKE_S = 150.0  # a learner may be building its model
ACTION_S = 600.0  # and may be held up for a while later, too
FLUSH_S = 2.0
REASON_S = 1.0  # for a learner that closed a lane to say why
STOP_S = 1.0
REFUSED_S, MAX_REFUSED_S = 5.0, 60.0  # between calls of a learner that does not want us


class LearnerGone(Exception):
    """The connection is lost, or there is none yet; dial again."""

    def __init__(self, text: str = "", retry_s: float | None = None, code: str = "") -> None:
        """`retry_s`: when, if the learner said so with a status of this `code`."""
        super().__init__(text)
        self.retry_s = retry_s
        self.is_too_early = retry_s is not None and code == "RESOURCE_EXHAUSTED"


class NotReady(Exception):
    """This end's own token or certificates cannot be used now; they may be being replaced."""


class Unfit(BadAnswer):
    """This end can do nothing with what the learner works with."""


class LearnerFinished(LearnerGone):
    """Training is finished: this learner takes no more steps."""


class LanesImpossible(Exception):
    """Who listens at this socket hands over no lanes; speak gRPC."""


NO_LINK = (LearnerGone, Refused, BadAnswer, NotReady)
"""Why environments wait, and dial again."""


class Redial:
    """When to dial the learner again, and what the log says meanwhile."""

    def __init__(self, address: str, who: str, repeats: RepeatFilter) -> None:
        """`who` dials; `repeats` says how often what is shown."""
        self._address = address
        self._who = who
        self._repeats = repeats
        self._back_off = dialing_back_off()
        self._refusals = BackOff(REFUSED_S, MAX_REFUSED_S)

    def succeeded(self) -> None:
        self._log(f"Playing with the learner at {self._address}.")
        self._back_off.reset()

    def pause_after(self, error: Exception) -> float:
        """Log why there is no link, and say how long to wait before the next call."""
        why = str(error).rstrip(".")
        if isinstance(error, LearnerGone):
            self._log(f"No learner at {self._address}: {why}. Dialing again.")
            return pause_of(error, self._back_off)
        what = f"The learner at {self._address} refused {self._who}"
        if isinstance(error, Unfit):
            what = f"The learner at {self._address} is none for {self._who}"
        elif isinstance(error, BadAnswer):
            what = f"The learner at {self._address} sent what breaks a rule"
        elif isinstance(error, NotReady):
            what = f"{self._who.capitalize()} cannot dial {self._address}"
        self._log(f"{what}: {why}. Asking again now and then.", logging.WARNING)
        return self._refusals.next_s()

    def _log(self, text: str, level: int = logging.INFO) -> None:
        shown = self._repeats.take(text)
        if shown is not None:
            logger.log(level, "%s", shown)


def token_now(security: Security) -> str:
    """Read at each call, as it may have been replaced; `NotReady`."""
    try:
        return security.read_token()
    except ValueError as error:
        raise NotReady(str(error)) from error


async def dial_lane(address: str, hello: Hello) -> tuple[JsonSocket, LaneLink, Greeting]:
    """Introduce environments to a learner of this machine, and wait for a lane.

    In a `LaneScheduler`. `LearnerGone`, `Refused`, `BadAnswer` or `LanesImpossible`. The connection
    must be closed after use.
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
    """`LearnerGone` if nothing is to be corrected at this end."""
    if refused.code in Refused.PERMANENT:
        return refused
    kind = LearnerFinished if refused.code == FINISHED else LearnerGone
    return kind(str(refused), refused.retry_s, refused.code)


def dialing_back_off() -> BackOff:
    """Many may have lost the same learner at the same moment."""
    return BackOff(jitter=FULL_JITTER)


def pause_of(error: Exception, back_off: BackOff) -> float:
    """Before the next call: longer and longer, and no shorter than the learner said."""
    return max(back_off.next_s(), getattr(error, "retry_s", None) or 0.0)


async def why_closed(link: LaneLink, connection: Any) -> Refused | LearnerGone:
    """What the learner said when it closed a lane, if it does so soon (in a `LaneScheduler`)."""
    message = link.message
    if message is None:
        with contextlib.suppress(EOFError, OSError, UnknownProtocol):
            message = await next_message(connection, REASON_S)
    if message is None or message["kind"] != "refused":
        return LearnerGone("It closed the lane.")
    return meaning_of(refusal_from_json(message))


def understood(message: dict[str, Any]) -> Greeting:
    """`BadAnswer` unless it is a Greeting of a version that we speak."""
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
    """(call, link, greeting) of a gRPC stream of environments to a learner; see `dial_call`."""
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
    """(call, answer, stream) of a call of a learner (in asyncio), after a `first` message.

    One of `NO_LINK`, also while it is in use. The connection of a call that is to be made again
    soon is in `kept` afterwards, and is taken from there: another handshake would cost both ends
    more than the call.
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
            # In one operation: a failed `write` would hide the status of who refuses early.
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
    except Refused as error:  # by this end: an answer that breaks a rule
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
    """How a call ended, if it says so soon."""
    try:
        async with asyncio.timeout(STOP_S):
            return await call.code(), await call.details(), await call.trailing_metadata()
    except TimeoutError:
        return None


def end_of_call(error: Any) -> Exception:
    """What a status means to who dialled."""
    if error is None:
        return LearnerGone("The connection was lost.")
    from libtorchbeast.rpc.messages import retry_s_in

    if not isinstance(error, tuple):
        error = error.code(), error.details(), error.trailing_metadata()
    code, details, metadata = error
    if code.name == "INTERNAL":  # all that grpc knows of a stream that is ended while it is written
        return LearnerGone(
            "It ended the stream at once; the token may be another, there may be no place left, or "
            "it is ending."
        )
    text = printable(details or code.name)
    return meaning_of(Refused(code.name, text, retry_s_in(metadata)))


@contextlib.asynccontextmanager
async def kept_connections() -> AsyncIterator[list[Any]]:
    """Where `dial_call` keeps them; closed in the end."""
    kept: list[Any] = []
    try:
        yield kept
    finally:
        for channel in kept:
            await channel.close()


async def finish_writing(call: Any, last: bytes = b"") -> None:
    """Say a last message, if there is one, and let go out what was written, if anybody listens."""
    import grpc.aio

    with contextlib.suppress(grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            if last:
                await call.write(last)
            await call.done_writing()


def check_owner(address: str) -> None:
    """Another user's socket does not get our token; `LearnerGone` if it is one."""
    path = Address.parse(address).path
    with contextlib.suppress(FileNotFoundError):
        if path and not is_ours(path):
            raise LearnerGone(f"The socket {path} belongs to another user; it is not called.")
