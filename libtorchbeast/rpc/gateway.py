"""A gateway: a process in which connections from outside end and lanes begin.

    environments ── gRPC ──► gateway ── lanes ──► actors in the learner's process
    hosts of this machine ── unix socket ──► gateway: hands a lane over, and is out of the way

Started by `Gateways` (gateway_supervisor.py) as `python -m libtorchbeast.rpc.gateway CONFIG`.
Everything that comes from other machines is read and checked here; the learner's process sees rows
of numbers only. Who is handed a lane is a process of the same user, and writes to it directly.

One event loop serves all streams: in a trial, a thread for each of 256 streams was less than half
as fast, and some got nearly a hundred times as many turns as others.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc._cython.cygrpc import ExecuteBatchError

import nest
from libtorchbeast.helper_process import SupervisorLine
from libtorchbeast.local_socket import JsonSocket, UnknownProtocol
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.memory import be_killed_first, give_memory_back
from libtorchbeast.rpc.address import Address, dial_unix, is_ours, listen_unix, speaks_http2
from libtorchbeast.rpc.certificates import CallerCheck
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig
from libtorchbeast.rpc.grpc_relay import private_address, relay
from libtorchbeast.rpc.grpc_streams import (
    INTRODUCE,
    READ,
    READ_GREETING,
    STEP,
    Read,
    Watched,
    Write,
    watch,
    watched,
)
from libtorchbeast.rpc.handshake import (
    MAX_TEXT,
    EnvironmentFailed,
    Greeting,
    Hello,
    Refused,
    hello_from_json,
    learner_is_ending,
    status_text,
)
from libtorchbeast.rpc.lane_handover import Host, Stall, raise_said, until_readable
from libtorchbeast.rpc.lane_pool import LanePool
from libtorchbeast.rpc.limits import Admission, server_options
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    LEARNER_METHOD,
    decode_answer,
    decode_hello,
    encode_greeting,
    token_in,
    token_metadata,
)
from libtorchbeast.rpc.steps import StepReader, encode_actions
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane, LaneClosed, allow_descriptors
from libtorchbeast.supervisor import BackOff
from libtorchbeast.text import printable, printable_lines

LOOK_FOR_SOCKET_S = 0.5
MAX_PAUSE_S = 5.0  # between two calls of an address
MAX_REASON = 200  # characters, of why nobody is there
MAX_UNAUTHENTICATED_TEXTS = 10  # a minute, of those who have not shown a token
# Who is refused while it writes its first message does not get to know why: a moment's patience,
# but with few at a time, as what they send comes into grpc's buffers meanwhile.
REFUSAL_S, MAX_REFUSING = 0.02, 16
STOP_S = 1.0
CHECK_SERVER_S = 0.05  # between two looks whether grpc listens
TRIM_S = 5.0  # between two times that freed memory is given back


@dataclass(frozen=True)
class _Server:
    """A server of grpc.aio."""

    server: Any
    address: str  # with its port
    calls: set[Any]  # that are open


class Gateway:
    def __init__(self, config: GatewayConfig, line: SupervisorLine) -> None:
        self._config = config
        self._line = line
        self._security = config.make_security()
        self._limits = config.make_limits()
        self._learner = JsonSocket(socket.socket(fileno=config.control_fd))
        self._lanes = LanePool(config.bell_fd, lambda **request: self._send("lane", **request))
        self._admission = Admission(self._limits)
        self._check_caller = CallerCheck(self._security, is_learner_expected=False)
        self._trimmed_at = time.monotonic()
        self._refusing = asyncio.Semaphore(MAX_REFUSING)
        self._streams: set[Watched] = set()
        self._callers: dict[str, list[asyncio.Task[None]]] = {}  # of each address that is dialled
        self._waiting: dict[str, str] = {}  # addresses without a stream, and why
        self._hands_over_no_lanes: set[str] = set()  # of the unix sockets that are dialled
        self._texts = RepeatFilter()
        self._unauthenticated_texts = RepeatFilter(MAX_UNAUTHENTICATED_TEXTS)
        self._stopped = asyncio.Event()
        self._num_playing = 0
        self._is_finished = False

    async def run(self) -> None:
        """Until the learner says so, or is gone."""
        asyncio.get_running_loop().set_exception_handler(self._report_lost_error)
        async with contextlib.AsyncExitStack() as stack:
            try:
                addresses = [
                    await stack.enter_async_context(self._listen(a)) for a in self._config.listen
                ]
            except (OSError, ValueError, RuntimeError) as error:
                self._send("failed", text=str(error))
                return
            self._send("ready", addresses=addresses)
            self._lanes.start()
            asyncio.get_running_loop().add_reader(self._learner.fileno(), self._read_messages)
            watcher = asyncio.create_task(watch(self._streams, self._look))
            for address in self._config.dial:
                self._have_callers(address, 1)
            await self._stopped.wait()
            for stream in list(self._streams):
                stream.end(self._ending())
            for task in [watcher, *itertools.chain(*self._callers.values())]:
                task.cancel()
        self._lanes.stop()

    # The learner.

    def _send(self, kind: str, **values: Any) -> None:
        if "text" in values:  # somebody else's words
            values["text"] = values["text"][-MAX_TEXT:]
        try:
            self._learner.send(kind, **values)
        except OSError:
            self._stopped.set()

    def _report(self, text: str, peer: str, kind: str = "warning") -> None:
        """To the learner's log."""
        shown = self._texts.take(text)
        if shown is not None:
            self._send(kind, text=shown, peer=peer)

    def _report_lost_error(self, loop: Any, context: dict[str, Any]) -> None:
        """Of a task that nobody waits for."""
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self._report("".join([*lines, context["message"]]), "gateway")

    def _read_messages(self) -> None:
        try:
            while (message := self._learner.next()) is not None:
                kind = message["kind"]
                if kind == "lane":
                    names = ("id", "fd", "spec", "num_envs")
                    if not self._lanes.grant(**{name: message[name] for name in names}):
                        self._send("lost", id=message["id"])
                elif kind == "refuse":
                    self._lanes.refuse(message["id"], message["code"], message["text"])
                else:
                    assert kind == "stop"
                    self._is_finished = self._is_finished or message["finished"]
                    self._stopped.set()
        except EOFError:
            self._stopped.set()

    def _ending(self) -> Refused:
        """What streams end with whose lane was closed; the learner may have said why before."""
        self._read_messages()
        return learner_is_ending(self._is_finished)

    @contextlib.contextmanager
    def _playing(self, hello: Hello, peer: str) -> Any:
        self._waiting.pop(peer, None)
        self._num_playing += 1
        self._send_counts()
        self._report(f"{hello.name} joined, {hello.num_envs} in a stream.", peer, "info")
        try:
            yield
        finally:
            self._num_playing -= 1
            self._send_counts()

    def _send_counts(self) -> None:
        self._send("streams", number=self._num_playing, waiting=self._waiting)

    def _greeting(self, token: str = "") -> Greeting:
        return Greeting("learner", token, self._config.knows_truncation)

    # Streams.

    async def _play(self, stream: Watched, hello: Hello, read: Read, write: Write,
                    accept: bytes | None) -> None:  # fmt: skip
        """Carry rows and actions until the environments leave."""
        stream.has_done(INTRODUCE)
        lane = await self._lanes.acquire(hello)
        lane.name = f"{hello.name} at {stream.peer}"
        try:
            with self._playing(hello, stream.peer):
                if accept is not None:
                    stream.expect(READ_GREETING, self._limits.write_s)
                    await write(accept)
                    stream.has_done(READ_GREETING)
                await self._carry(stream, lane, read, write)
        except LaneClosed as error:
            raise self._ending() from error
        finally:
            self._lanes.release(lane)

    async def _carry(self, stream: Watched, lane: Lane, read: Read, write: Write) -> None:
        reader = StepReader(lane.spec, lane.num_envs, lane.rows)
        actions = nest.flatten(lane.actions)
        last_actions = nest.flatten(lane.rows["last_action"])
        for last in last_actions:
            last[...] = 0
        while True:
            stream.expect(STEP, self._limits.step_s)
            data = await read()
            stream.has_done(STEP)
            if data is grpc.aio.EOF:
                return
            reader.read(data)
            if reader.info:
                lane.add_info(reader.info)
            lane.send_rows()
            if await self._lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise self._ending()
            for last, action in zip(last_actions, actions, strict=True):
                last[...] = action
            stream.num_steps += 1
            stream.expect(READ, self._limits.write_s)
            await write(encode_actions(lane.actions))
            stream.has_done(READ)

    # Lanes of hosts of this machine.

    async def _hand_over(self, stream: Watched, hello: Hello, host: Host) -> None:
        """Give the host a lane, and stay until it leaves."""
        stream.has_done(INTRODUCE)
        lane = await self._lanes.acquire_to_hand_over(hello)
        lane.name = f"{hello.name} at {stream.peer}"
        try:
            with self._playing(hello, stream.peer):
                host.send("lane", fd=lane.fd, num_envs=lane.num_envs)
                lane.release()
                stall = Stall(lane)
                while True:
                    message = await host.next(timeout_s=LOOK_FOR_SOCKET_S)
                    if message is not None:
                        raise_said(message)
                    if stall.lasts_s() > self._limits.step_s:
                        text = f"The other end has not {STEP} in time."
                        raise Refused("DEADLINE_EXCEEDED", text)
        except EOFError:
            pass  # it left
        finally:
            stream.num_steps = lane.num_passes
            self._lanes.retire(lane)

    # Environments that dial in.

    @contextlib.asynccontextmanager
    async def _listen(self, address: str) -> AsyncIterator[str]:
        """Listen at an address; yields it, with its port."""
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

        async def serve(requests: Any, context: Any) -> None:
            calls.add(context)
            try:
                await self._serve(requests, context)
            finally:
                calls.discard(context)

        handler = grpc.stream_stream_rpc_method_handler(serve)
        service, method = LEARNER_METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        bound = self._security.add_port(server, address)
        await server.start()
        return _Server(server, bound, calls)

    async def _keep_listening(self, current: _Server) -> None:
        """Until it is cancelled. A request whose path is not UTF-8 stops a server of grpc.aio.

        Such a server serves the calls it has and takes no more: another one does.
        """
        stopped: list[_Server] = []
        try:
            while True:
                await asyncio.sleep(CHECK_SERVER_S)
                if not current.server._server.is_running():
                    stopped = [server for server in [*stopped, current] if server.calls]
                    text = "grpc stopped listening after a bad request; the gateway listens again."
                    self._report(text, current.address)
                    current = await self._start_again(current.address)
        finally:
            if current.server._server.is_running():  # else it cannot be stopped again
                await current.server.stop(STOP_S)

    async def _start_again(self, address: str) -> _Server:
        while True:
            try:
                return await self._start_server(address)
            except (OSError, ValueError, RuntimeError) as error:
                self._report(f"The gateway cannot listen again yet: {error}", address)
                await asyncio.sleep(LOOK_FOR_SOCKET_S)

    async def _until_streams_end(self) -> None:
        """Those of servers that have stopped, which nobody else waits for."""
        deadline = time.monotonic() + STOP_S
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_SERVER_S)

    async def _accept(self, listener: socket.socket, behind: str) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # who called has left, or no descriptor is left
                await asyncio.sleep(LOOK_FOR_SOCKET_S)
                continue
            task = asyncio.create_task(self._welcome(connection, behind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _welcome(self, connection: socket.socket, behind: str) -> None:
        """Somebody at a unix socket: a host of ours, or who speaks gRPC."""
        try:
            await until_readable(connection, self._limits.handshake_s)
            if speaks_http2(connection):
                await relay(connection, behind)
                return
        except (OSError, TimeoutError):
            connection.close()
            return
        host = Host(connection)
        try:
            await self._serve_host(host)
        finally:
            host.close()

    async def _serve_host(self, host: Host) -> None:
        """One host of this machine that dialled in."""

        async def serve(stream: Watched) -> None:
            self._admission.count(stream)
            with self._admission.introduction(stream):
                message = await host.next(self._limits.handshake_s)
                if message is None or message["kind"] != "hello":
                    return
                hello = hello_from_json(message, self._limits.max_message_bytes, self._check_token)
            stream.is_authenticated = True
            with self._admission.play():
                host.send("greeting", **self._greeting().to_json())
                await self._hand_over(stream, hello, host)

        refusal = await self._guard("unix:", serve)
        if refusal is not None:
            with contextlib.suppress(EOFError):
                host.send("refused", code=refusal.code, text=str(refusal))

    async def _serve(self, requests: Any, context: Any) -> None:
        """One stream of environments that dialled in."""

        async def serve(stream: Watched) -> None:
            self._admission.count(stream)
            # Before anything is read: what nobody asks for stays in the sender's memory.
            token = token_in(context.invocation_metadata())
            try:
                stream.certified_name = self._check_caller(token, context.auth_context())
            except Refused:
                if not self._refusing.locked():
                    async with self._refusing:
                        await asyncio.sleep(REFUSAL_S)
                raise
            with self._admission.introduction(stream):
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                hello = decode_hello(data, self._limits.max_message_bytes)
            stream.is_authenticated = True
            with self._admission.play():
                accept = encode_greeting(self._greeting())
                await self._play(stream, hello, context.read, context.write, accept)

        refusal = await self._guard(context.peer(), serve)
        if refusal is not None:
            await context.abort(grpc.StatusCode[refusal.code], status_text(str(refusal)))

    async def _guard(
        self, peer: str, serve: Callable[[Watched], Awaitable[None]]
    ) -> Refused | None:
        """Serve who dialled in; what it is refused for, if it is."""
        stream: Watched | None = None
        try:
            async with watched(self._streams, peer) as stream:
                stream.expect(INTRODUCE, self._limits.handshake_s)
                if self._stopped.is_set():
                    raise self._ending()
                await serve(stream)
        except Refused as error:
            self._report_refusal(error, peer, stream is not None and stream.is_authenticated)
            # Not the one that was raised: its traceback holds on to the message.
            return Refused(error.code, str(error))
        except EnvironmentFailed as error:
            self._report(printable_lines(str(error)), peer, "environment_failed")
        except (EOFError, UnknownProtocol, ExecuteBatchError):
            pass  # the other end is gone
        except Exception:
            self._report(traceback.format_exc(), peer)
            return Refused("INTERNAL", "Something is wrong in the gateway; see its log.")
        return None

    def _report_refusal(self, error: Refused, peer: str, is_authenticated: bool) -> None:
        texts = self._texts if is_authenticated else self._unauthenticated_texts
        shown = texts.take(f"Environments were refused: {error}")
        if error.code != "UNAVAILABLE" and shown is not None:
            self._send("warning", text=shown, peer=peer)

    def _check_token(self, token: str) -> None:
        self._check_caller(token, {})

    def _look(self) -> None:
        """Called a few times a second."""
        self._line.tick()
        for stream in list(self._streams):
            try:
                self._check_caller.check_name(stream.certified_name)
            except Refused as error:
                stream.end(error)
        if time.monotonic() - self._trimmed_at > TRIM_S:
            self._trimmed_at = time.monotonic()
            give_memory_back()

    # Environments that listen.

    def _have_callers(self, address: str, number: int) -> None:
        """As many as the environments there want, or as the learner does if that is more."""
        number = max(number, self._config.dial.count(address))
        callers = self._callers.setdefault(address, [])
        while len(callers) < number:
            callers.append(asyncio.create_task(self._dial(address)))
        while len(callers) > number:
            callers.pop().cancel()

    async def _dial(self, address: str) -> None:
        """Call an address for ever; whoever is there may come and go."""
        back_off = BackOff(max_s=MAX_PAUSE_S)
        path = Address.parse(address).path
        while not self._stopped.is_set():
            if path and not self._is_there(path, address):
                await asyncio.sleep(LOOK_FOR_SOCKET_S)
                continue
            if await self._dial_once(address):
                back_off.reset()
            await asyncio.sleep(back_off.next_s())

    def _is_there(self, path: str, address: str) -> bool:
        """Whether somebody listens at a unix socket who may have our token."""
        try:
            if is_ours(path):
                return True
        except OSError:
            self._wait_for(address, "no such socket")
            return False
        self._wait_for(address, "another user's socket")
        self._report(f"The socket {path} belongs to another user; it is not called.", path)
        return False

    def _wait_for(self, address: str, why: str) -> None:
        why = why[:MAX_REASON]
        if self._waiting.get(address) != why:
            self._waiting[address] = why
            self._send_counts()

    async def _dial_once(self, address: str) -> int:
        """One call, from its start to its end; returns the number of steps."""
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
            self._wait_for(address, str(error))
            self._report(f"The environments at {address} cannot be used: {error}", address)
        except EnvironmentFailed as error:
            self._wait_for(address, "an environment failed")
            self._report(printable_lines(str(error)), address, "environment_failed")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EOFError, OSError) as error:
            self._report_end(stream, error)
        except UnknownProtocol:
            self._hands_over_no_lanes.add(address)
            return 1  # at once, over gRPC
        except Exception:
            self._report(traceback.format_exc(), address)
        return stream.num_steps if stream is not None else 0

    def _report_end(self, stream: Watched, error: Exception) -> None:
        """What a call ended with."""
        address = stream.peer
        text = printable(str(error)) or "it closed the connection"
        if isinstance(error, grpc.aio.AioRpcError):
            text = printable(error.details() or error.code().name)
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self._wait_for(address, text)
                self._report(f"The environments at {address} cannot be used: {text}", address)
                return
        what = "went away" if stream.num_steps else "cannot be reached yet"
        self._wait_for(address, text)
        self._report(f"The environments at {address} {what}: {text}", address, "info")

    async def _call(self, stream: Watched) -> None:
        channel = self._security.aio_channel(stream.peer, self._limits)
        try:
            metadata = token_metadata(self._security.read_token())
            call = channel.stream_stream("/" + "/".join(ENVIRONMENTS_METHOD))(metadata=metadata)

            async def write(data: bytes) -> None:
                if call.done():  # reading says how it ended, and writing does not
                    await call.read()
                await call.write(data)

            await write(encode_greeting(self._greeting()))
            data = await call.read()
            if data is grpc.aio.EOF:
                raise EOFError
            hello = decode_answer(data, self._limits.max_message_bytes)
            self._have_callers(stream.peer, hello.num_streams)
            await self._play(stream, hello, call.read, write, None)
        finally:
            await channel.close()

    async def _call_host(self, stream: Watched, path: str) -> None:
        host = Host(dial_unix(path))
        try:
            host.send("greeting", **self._greeting(self._security.read_token()).to_json())
            message = await host.next(self._limits.build_s)
            if message is None:
                raise Refused("DEADLINE_EXCEEDED", f"The other end has not {INTRODUCE} in time.")
            if message["kind"] != "hello":
                raise_said(message)
            hello = hello_from_json(message, self._limits.max_message_bytes)
            self._have_callers(stream.peer, hello.num_streams)
            await self._hand_over(stream, hello, host)
        finally:
            host.close()


def main(text: str) -> None:
    values = json.loads(text)
    line = SupervisorLine(values.pop("line"))
    config = GatewayConfig(**values)
    be_killed_first()
    allow_descriptors(DESCRIPTORS_PER_STREAM * config.limits["max_streams"])

    async def run() -> None:
        await Gateway(config, line).run()

    try:
        asyncio.run(run())
    except Exception:
        line.send(logging.ERROR, traceback.format_exc())
        raise


if __name__ == "__main__":
    main(sys.argv[1])
