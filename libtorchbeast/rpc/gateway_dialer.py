"""The part of a gateway that dials environment servers, and dials them again when they are lost."""

import asyncio
import traceback
from typing import Any

import grpc
import grpc.aio

from libtorchbeast.json_socket import UnknownProtocol
from libtorchbeast.rpc.address import Address, dial_unix, is_ours
from libtorchbeast.rpc.gateway_config import GatewayConfig
from libtorchbeast.rpc.gateway_streams import carry_steps
from libtorchbeast.rpc.grpc_streams import INTRODUCE, STEP, Watched, exchange, watched
from libtorchbeast.rpc.handshake import EnvironmentFailed, Refused, hello_from_json
from libtorchbeast.rpc.lane_handover import Host, hand_over, raise_for_message
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    decode_answer,
    encode_greeting,
    token_metadata,
)
from libtorchbeast.supervisor import BackOff
from libtorchbeast.text import printable, printable_lines

LOOK_FOR_SOCKET_S = 0.5
MAX_PAUSE_S = 5.0  # between two calls of an address


class Dialer:
    """Dials the environment servers of a gateway until it is stopped."""

    def __init__(
        self, config: GatewayConfig, learner: LearnerConnection, streams: set[Watched]
    ) -> None:
        """Open streams are kept in `streams`."""
        self._config = config
        self._learner = learner
        self._streams = streams
        self._security = config.security
        self._limits = config.limits
        self._callers: dict[str, list[asyncio.Task[None]]] = {}  # by address
        self._hands_over_no_lanes: set[str] = set()  # unix sockets where gRPC is spoken

    def start(self) -> None:
        for address in self._config.dial:
            self._have_callers(address, 1)

    def stop(self) -> None:
        for callers in self._callers.values():
            for task in callers:
                task.cancel()

    def _have_callers(self, address: str, number: int) -> None:
        """Run `number` tasks that dial an address, or more if it is configured more often."""
        number = max(number, self._config.dial.count(address))
        callers = self._callers.setdefault(address, [])
        while len(callers) < number:
            callers.append(asyncio.create_task(self._dial(address)))
        while len(callers) > number:
            callers.pop().cancel()

    async def _dial(self, address: str) -> None:
        """Dial an address again and again, until the learner ends."""
        back_off = BackOff(max_s=MAX_PAUSE_S)
        path = Address.parse(address).path
        while not self._learner.stopped.is_set():
            if path and not self._is_there(path, address):
                await asyncio.sleep(LOOK_FOR_SOCKET_S)
                continue
            if await self._dial_once(address):
                back_off.reset()
            await asyncio.sleep(back_off.next_s())

    def _is_there(self, path: str, address: str) -> bool:
        """Whether a unix socket exists, and may be sent our token; report it if not."""
        try:
            if is_ours(path):
                return True
        except OSError:
            self._learner.wait_for(address, "no such socket")
            return False
        self._learner.wait_for(address, "another user's socket")
        self._learner.report(
            f"The socket {path} belongs to another user, so it is not dialled; name another.", path
        )
        return False

    async def _dial_once(self, address: str) -> int:
        """Make one call and serve it until it ends; return the number of steps."""
        stream: Any = None
        try:
            async with watched(self._streams, address) as stream:
                stream.expect(INTRODUCE, self._limits.build_s)
                path = Address.parse(address).path
                if path and address not in self._hands_over_no_lanes:
                    await self._call_host(stream, path)
                else:
                    await self._call(stream)
        except Refused as error:
            stream.is_authenticated = True  # this end chose whom to dial
            self._learner.clients.count_refusal(stream, error)
            self._learner.wait_for(address, str(error))
            self._learner.report(f"The environments at {address} cannot be used: {error}", address)
        except EnvironmentFailed as error:
            self._learner.wait_for(address, "an environment failed")
            self._learner.report(printable_lines(str(error)), address, "environment_failed")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EOFError, OSError) as error:
            self._report_end(stream, error)
        except UnknownProtocol:
            self._hands_over_no_lanes.add(address)
            return 1  # resets the back-off: dial again soon, over gRPC
        except ValueError as error:  # the file of a token or certificate, being replaced
            self._learner.wait_for(address, str(error))
            self._learner.report(f"The environments at {address} are not dialled: {error}", address)
        except Exception:
            self._learner.report(traceback.format_exc(), address)
        return stream.num_steps if stream is not None else 0

    def _report_end(self, stream: Watched, error: Exception) -> None:
        """Report the error of the connection with which a call ended."""
        address = stream.peer
        text = printable(str(error)) or "it closed the connection"
        if isinstance(error, grpc.aio.AioRpcError):
            text = printable(error.details() or error.code().name)
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self._learner.wait_for(address, text)
                self._learner.report(
                    f"The environments at {address} cannot be used: {text}", address
                )
                return
        what = "went away" if stream.num_steps else "cannot be reached yet"
        self._learner.wait_for(address, text)
        self._learner.report(f"The environments at {address} {what}: {text}", address, "info")

    async def _call(self, stream: Watched) -> None:
        """Play with environments over gRPC."""
        channel = self._security.aio_channel(stream.peer, self._limits)
        try:
            metadata = token_metadata(self._security.read_token())
            call = channel.stream_stream("/" + "/".join(ENVIRONMENTS_METHOD))(metadata=metadata)
            await call.write(encode_greeting(self._config.greeting()))
            data = await call.read()
            if data is grpc.aio.EOF:
                raise EOFError
            hello = decode_answer(data, self._limits.max_message_bytes)
            self._have_callers(stream.peer, hello.num_streams)

            async def answer(data: bytes) -> Any:
                stream.expect(STEP, self._limits.step_s)
                return await exchange(call, data)

            await carry_steps(self._learner, stream, hello, call.read, answer)
        finally:
            await channel.close()

    async def _call_host(self, stream: Watched, path: str) -> None:
        """Hand a lane over to a host that listens at a unix socket."""
        host = Host(dial_unix(path))
        try:
            host.send("greeting", **self._config.greeting(self._security.read_token()).to_json())
            message = await host.next(self._limits.build_s)
            if message is None:
                raise Refused("DEADLINE_EXCEEDED", f"The other end has not {INTRODUCE} in time.")
            if message["kind"] != "hello":
                raise_for_message(message)
            hello = hello_from_json(message, self._limits.max_message_bytes)
            self._have_callers(stream.peer, hello.num_streams)
            await hand_over(stream, hello, host, self._learner)
        finally:
            host.close()
