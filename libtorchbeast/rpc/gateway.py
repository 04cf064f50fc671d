"""A gateway: a process in which gRPC streams end and lanes begin.

    environments ── gRPC ──► gateway ── lanes ──► actors in the learner's process

Started by `Gateways` (gateways.py) as `python -m libtorchbeast.rpc.gateway CONFIG`. Everything that
comes from outside is read and checked here; the learner's process sees rows of numbers only. One
event loop serves all streams: in a trial, a thread for each of 256 streams was less than half as
fast, and some streams got nearly a hundred times as many turns as others.
"""

import asyncio
import itertools
import random
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

import nest
from libtorchbeast.lanes import AGENT, ENVIRONMENT, Lane, LaneClosed, allow_descriptors
from libtorchbeast.rpc.control import ControlSocket
from libtorchbeast.rpc.exchange import Read, Write, exchange
from libtorchbeast.rpc.gateway_config import DESCRIPTORS_PER_STREAM, GatewayConfig
from libtorchbeast.rpc.lane_pool import LanePool, learner_is_ending
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    LEARNER_METHOD,
    EnvironmentFailed,
    Greeting,
    Hello,
    Refused,
    decode_answer,
    decode_hello,
    encode_greeting,
    printable,
    status_text,
)
from libtorchbeast.rpc.security import (
    Address,
    ConnectionRate,
    Limits,
    Security,
    Strangers,
    check_token,
    is_ours,
    server_options,
)
from libtorchbeast.rpc.steps import StepReader, encode_actions
from libtorchbeast.worker import exit_if_orphaned, set_up_process

WATCH_S = 0.5  # how often streams are looked at for what takes too long
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 5.0  # between two calls of an address
LOOK_FOR_SOCKET_S = 0.5
SAME_TEXT_S = 60.0  # the same sentence is told once in so long
MAX_TEXTS = 100  # different ones, in so long
MAX_STRANGERS_TEXTS = 10  # of those who have not shown a token
STOP_S = 1.0

# What an other end must do in time.
INTRODUCE, STEP, READ = "introduced itself", "taken a step", "read its actions"


@dataclass(eq=False)
class Stream:
    """One stream, as its watchers see it."""

    peer: str
    task: asyncio.Task[Any] | None = None
    deadlines: dict[str, float] = field(default_factory=dict)  # of what is expected
    ended_by: Refused | None = None
    num_steps: int = 0

    def expect(self, what: str, seconds: float) -> None:
        """The other end must do this in time."""
        self.deadlines[what] = time.monotonic() + seconds

    def has_done(self, what: str) -> None:
        self.deadlines.pop(what, None)

    def end(self, why: Refused) -> None:
        if self.ended_by is None and self.task is not None:
            self.ended_by = why
            self.task.cancel()


class Texts:
    """What is told to the learner's log: not the same again and again, and not too much."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._told: dict[str, float] = {}

    def take(self, text: str) -> bool:
        """Whether to tell this."""
        now = time.monotonic()
        self._told = {text: at for text, at in self._told.items() if now - at < SAME_TEXT_S}
        if text in self._told or len(self._told) >= self._most:
            return False
        self._told[text] = now
        return True


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._security = Security.from_json(config.security)
        self._limits = Limits(**config.limits)
        self._token = self._security.read_token()
        self._control = ControlSocket(socket.socket(fileno=config.control_fd))
        self._lanes = LanePool(config.bell_fd, lambda **wish: self._tell("lane", **wish))
        self._rate = ConnectionRate(self._limits)
        self._streams: set[Stream] = set()
        self._callers: dict[str, list[asyncio.Task[None]]] = {}  # of each address that is dialled
        self._texts = Texts(MAX_TEXTS)
        self._strangers = Strangers(self._limits)
        self._strangers_texts = Texts(MAX_STRANGERS_TEXTS)
        self._stopped = asyncio.Event()
        self._num_playing = 0

    async def run(self) -> None:
        """Until the learner says so, or is gone."""
        server = None
        try:
            if self._config.listen:
                server, addresses = await self._listen()
                self._tell("ready", addresses=addresses)
            else:
                self._tell("ready", addresses=[])
        except (OSError, ValueError, RuntimeError) as error:
            self._tell("failed", text=str(error))
            return
        self._lanes.start()
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._hear)
        watch = asyncio.create_task(self._watch())
        for address in self._config.dial:
            self._have_callers(address, 1)
        await self._stopped.wait()
        for stream in list(self._streams):
            stream.end(learner_is_ending())
        for task in [watch, *itertools.chain(*self._callers.values())]:
            task.cancel()
        if server is not None:
            await server.stop(STOP_S)
        self._lanes.stop()

    # The learner.

    def _tell(self, kind: str, **values: Any) -> None:
        try:
            self._control.send(kind, **values)
        except OSError:
            self._stopped.set()

    def _report(self, text: str, peer: str, kind: str = "warning") -> None:
        """To the learner's log."""
        if self._texts.take(text):
            self._tell(kind, text=text, peer=peer)

    def _hear(self) -> None:
        try:
            for message in self._control.receive():
                kind = message["kind"]
                if kind == "lane":
                    names = ("id", "fd", "spec", "num_actions", "num_envs")
                    self._lanes.grant(**{name: message[name] for name in names})
                elif kind == "refuse":
                    self._lanes.refuse(message["id"], message["code"], message["text"])
                else:
                    assert kind == "stop"
                    self._stopped.set()
        except EOFError:
            self._stopped.set()

    async def _watch(self) -> None:
        """End streams that let us wait too long, and this process with its parent."""
        while True:
            await asyncio.sleep(WATCH_S)
            exit_if_orphaned(self._config.parent)
            self._tell("alive")
            now = time.monotonic()
            for stream in list(self._streams):
                for what, deadline in stream.deadlines.items():
                    if deadline < now:
                        text = f"The other end has not {what} in time."
                        stream.end(Refused("DEADLINE_EXCEEDED", text))

    # Streams.

    async def _play(self, stream: Stream, hello: Hello, read: Read, write: Write,
                    accept: bytes | None) -> None:  # fmt: skip
        """Carry rows and actions until the environments leave."""
        stream.has_done(INTRODUCE)
        lane = await self._lanes.acquire(hello)
        self._num_playing += 1
        self._tell("streams", number=self._num_playing)
        self._report(f"{hello.name} joined, {hello.num_envs} in a stream.", stream.peer, "info")

        async def send(data: bytes) -> None:
            stream.expect(READ, self._limits.write_s)
            await write(data)
            stream.has_done(READ)
            stream.expect(STEP, self._limits.step_s)

        try:
            if accept is not None:
                await send(accept)
            await self._carry(stream, lane, read, send)
        except LaneClosed as error:
            raise learner_is_ending() from error
        finally:
            self._lanes.release(lane)
            self._num_playing -= 1
            self._tell("streams", number=self._num_playing)

    async def _carry(self, stream: Stream, lane: Lane, read: Read, write: Write) -> None:
        reader = StepReader(lane.spec, lane.num_envs, lane.rows)
        actions = nest.flatten(lane.actions)
        last_actions = nest.flatten(lane.rows[-1])
        for last in last_actions:
            last[...] = 0
        stream.expect(STEP, self._limits.step_s)
        data = await read()
        while data is not grpc.aio.EOF:
            stream.has_done(STEP)
            reader.read(data)
            lane.send_rows()
            if await self._lanes.wait_while(lane, AGENT) != ENVIRONMENT:
                raise learner_is_ending()
            for last, action in zip(last_actions, actions, strict=True):
                last[...] = action
            stream.num_steps += 1
            data = await exchange(read, write, encode_actions(lane.actions))

    # Environments that dial in.

    async def _listen(self) -> tuple[Any, list[str]]:
        server = grpc.aio.server(
            options=server_options(self._limits, self._config.share_port),
            maximum_concurrent_rpcs=2 * self._limits.max_streams,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        service, method = LEARNER_METHOD
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        addresses = [self._security.add_port(server, address) for address in self._config.listen]
        await server.start()
        return server, addresses

    async def _serve(self, requests: Any, context: Any) -> None:
        """One stream of environments that dialled in."""
        task = asyncio.current_task()
        assert task is not None
        stream = Stream(context.peer(), task)
        self._streams.add(stream)
        stream.expect(INTRODUCE, self._limits.handshake_s)
        refused = None
        texts = self._strangers_texts
        try:
            if self._stopped.is_set():
                raise learner_is_ending()
            if len(self._streams) > self._limits.max_streams:
                raise Refused(
                    "RESOURCE_EXHAUSTED",
                    f"This gateway takes {self._limits.max_streams} streams, and all are in use.",
                )
            self._rate.take(stream.peer)
            with self._strangers.meet(stream.peer):
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                hello = decode_hello(
                    data,
                    self._limits.max_message_bytes,
                    check_token=lambda token: check_token(self._token, token),
                )
            texts = self._texts
            accept = encode_greeting(
                Greeting("learner", knows_truncation=self._config.knows_truncation)
            )
            await self._play(stream, hello, context.read, context.write, accept)
        except Refused as error:
            refused = error
        except EnvironmentFailed as error:
            self._report(printable_lines(str(error)), stream.peer, "environment_failed")
        except asyncio.CancelledError:
            if stream.ended_by is None:
                raise  # the other end is gone
            task.uncancel()
            refused = stream.ended_by
        except Exception:
            self._report(traceback.format_exc(), stream.peer)
            refused = Refused("INTERNAL", "Something is wrong in the gateway; see its log.")
        finally:
            self._streams.discard(stream)
        if refused is not None:
            text = f"Environments were refused: {refused}"
            if refused.code != "UNAVAILABLE" and texts.take(text):
                self._tell("warning", text=text, peer=stream.peer)
            await context.abort(grpc.StatusCode[refused.code], status_text(str(refused)))

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
        pause_s = FIRST_PAUSE_S
        path = Address.parse(address).path
        while not self._stopped.is_set():
            if path and not self._is_there(path):
                await asyncio.sleep(LOOK_FOR_SOCKET_S)
                continue
            num_steps = await self._dial_once(address)
            pause_s = FIRST_PAUSE_S if num_steps else min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))

    def _is_there(self, path: str) -> bool:
        """Whether somebody listens at a unix socket whom we may tell our token."""
        try:
            if is_ours(path):
                return True
        except OSError:
            return False  # nobody, and nothing to say about it
        self._report(f"The socket {path} belongs to another user; it is not called.", path)
        return False

    async def _dial_once(self, address: str) -> int:
        """One call, from its start to its end; returns the number of steps."""
        stream = Stream(address)
        stream.expect(INTRODUCE, self._limits.build_s)
        stream.task = asyncio.create_task(self._call(stream))
        self._streams.add(stream)
        try:
            await stream.task
        except Refused as error:
            self._report(f"The environments at {address} do not fit: {error}", address)
        except EnvironmentFailed as error:
            self._report(printable_lines(str(error)), address, "environment_failed")
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            self._report_end(stream, error)
        except asyncio.CancelledError:
            stream.task.cancel()
            if stream.ended_by is None or self._stopped.is_set():
                raise
            self._report(f"The environments at {address}: {stream.ended_by}", address)
        except Exception:
            self._report(traceback.format_exc(), address)
        finally:
            self._streams.discard(stream)
        return stream.num_steps

    def _report_end(self, stream: Stream, error: Exception) -> None:
        """What a call ended with, as grpc tells it."""
        address = stream.peer
        if isinstance(error, grpc.aio.AioRpcError):
            text = printable(error.details() or error.code().name)
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self._report(f"The environments at {address} ended the call: {text}", address)
                return
        else:
            text = str(error)
        what = "went away" if stream.num_steps else "cannot be reached yet"
        self._report(f"The environments at {address} {what}: {text}", address, "info")

    async def _call(self, stream: Stream) -> None:
        channel = self._security.aio_channel(stream.peer, self._limits.max_message_bytes)
        try:
            call = channel.stream_stream("/" + "/".join(ENVIRONMENTS_METHOD))()
            greeting = Greeting("learner", self._token, self._config.knows_truncation)
            await call.write(encode_greeting(greeting))
            data = await call.read()
            if data is not grpc.aio.EOF:
                hello = decode_answer(data, self._limits.max_message_bytes)
                self._have_callers(stream.peer, hello.num_streams)
                await self._play(stream, hello, call.read, call.write, None)
        finally:
            await channel.close()


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


async def run(config: GatewayConfig) -> None:
    await Gateway(config).run()


def main(text: str) -> None:
    config = GatewayConfig.from_json(text)
    set_up_process(config.parent)
    allow_descriptors(DESCRIPTORS_PER_STREAM * config.limits["max_streams"])
    asyncio.run(run(config))


if __name__ == "__main__":
    main(sys.argv[1])
