"""Environments that listen: each learner that dials gets groups of environments of its own.

At a unix socket the learner hands over lanes, and one thread plays on all of them in turn
(lane_scheduler.py), without importing gRPC. At a port, and for clients that speak gRPC at the
socket, grpc_server.py serves the groups.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from libtorchbeast.env_host import BadAnswer, play
from libtorchbeast.groups import Group
from libtorchbeast.grpc_forks import GrpcForks
from libtorchbeast.json_socket import JsonSocket, UnknownProtocol
from libtorchbeast.lane_scheduler import LaneScheduler, next_message, pause, readable
from libtorchbeast.rpc.address import Address, listen_unix, speaks_http2
from libtorchbeast.rpc.certificates import CallerCheck
from libtorchbeast.rpc.handshake import MAX_TEXT, Hello, Refused, greeting_from_json, invalid
from libtorchbeast.rpc.lane_receipt import receive_lane
from libtorchbeast.rpc.limits import Admission, Limits
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import LaneClosed
from libtorchbeast.sync_envs import SyncEnvs
from libtorchbeast.text import encodable

logger = logging.getLogger("torchbeast")

MAX_STREAMS = 64  # each has environments of its own
GRANT_S = 600.0  # for a learner to hand over a lane: it may be building its model
FOREVER_S = 1e9
NO_DESCRIPTOR_S = 0.5  # before another try to accept a connection

MakeGroup = Callable[[bool], Group]
"""`make_group(knows_truncation)` makes a group of environments for a learner."""


class EnvironmentServer:
    """Serves groups of environments until it is stopped; `Server` serves single environments."""

    def __init__(
        self,
        make_group: MakeGroup,
        server_address: str,
        name: str = "environments",
        security: Security | None = None,
        limits: Limits | None = None,
        num_streams: int = 1,
        tick: Callable[[], None] = lambda: None,
        max_groups: int | None = None,
    ) -> None:
        """`num_streams` is the number of streams that the learner is asked to open: while the agent
        computes actions for one group, the others step. `tick` is called at every step, and a few
        times a second. At most `max_groups` groups exist at a time; None: `num_streams`."""
        self._groups = Groups(make_group, num_streams if max_groups is None else max_groups)
        self._name = name
        self._num_streams = num_streams
        self._security = security or Security()
        self._security.check_listening(server_address)
        self._limits = limits or Limits(max_streams=MAX_STREAMS)
        self._tick = tick
        self._admission = Admission(self._limits)
        self._check_caller = CallerCheck(self._security, is_learner_expected=True)
        self._is_stopped = False
        self._stop: Callable[[], object] = lambda: None
        self.server_address = server_address

    def run(self, on_listening: Callable[[str], None] = lambda address: None) -> None:
        """Serve until `stop()`; raise OSError with one sentence if it cannot listen there."""
        if Address.parse(self.server_address).path:
            self._run_on_lanes(on_listening)
        else:
            self._run_streams(self.server_address, on_listening)

    def stop(self) -> None:
        """Make `run()` return, now or when it is called; any thread may call this."""
        self._is_stopped = True
        self._stop()

    def introduce(self, group: Group) -> Hello:
        """Return the Hello that introduces a group."""
        return Hello(
            name=self._name,
            num_envs=group.num_envs,
            spec=group.spec,
            num_streams=self._num_streams,
        )

    # Streams.

    def _run_streams(self, address: str, on_listening: Callable[[str], None]) -> None:
        server = self._stream_server(self._tick)
        self._stop = server.stop
        if self._is_stopped:  # checked once `_stop` is set, so that no call of stop() is missed
            return

        def listening(address: str) -> None:
            self.server_address = address
            on_listening(address)

        server.run(address, listening)

    def _stream_server(self, tick: Callable[[], None]) -> Any:
        GrpcForks.check(self.server_address)
        from libtorchbeast.rpc.grpc_server import StreamServer

        return StreamServer(
            self._groups, self.introduce, self._security, self._admission, self._limits, tick
        )

    # Lanes.

    def _run_on_lanes(self, on_listening: Callable[[str], None]) -> None:
        streams = StreamsBehind(self._stream_server, self._tick)
        scheduler = LaneScheduler(streams.tick_of_lanes)
        self._stop = scheduler.stop
        if self._is_stopped:
            return
        path = Address.parse(self.server_address).path
        listener = listen_unix(self.server_address)
        try:
            scheduler.add(self._accept(listener, scheduler, streams))
            on_listening(self.server_address)
            scheduler.run()
        finally:
            listener.close()
            if os.path.exists(path):
                os.unlink(path)
            streams.close()

    async def _accept(
        self, listener: socket.socket, scheduler: LaneScheduler, streams: "StreamsBehind"
    ) -> None:
        while True:
            await readable(listener, FOREVER_S)
            try:
                connection, _ = listener.accept()
            except OSError:  # the client has left, or no file descriptor is free
                await pause(NO_DESCRIPTOR_S)
                continue
            connection.setblocking(False)
            scheduler.add(self._welcome(connection, streams))

    async def _welcome(self, connection: socket.socket, streams: "StreamsBehind") -> None:
        try:
            await readable(connection, self._limits.handshake_s)
            if speaks_http2(connection):
                await streams.take(connection)
                return
        except Exception as error:
            if not isinstance(error, OSError):  # an OSError: the client has left
                logger.error("Clients that speak gRPC are refused at %s: %s",
                             self.server_address, error)  # fmt: skip
            connection.close()
            return
        peer = JsonSocket(connection)
        try:
            await self._serve(peer, streams.tick_of_lanes)
        except (EOFError, UnknownProtocol, OSError, LaneClosed):
            pass  # the learner left, or the peer is no learner
        except Refused as error:
            peer.try_send("refused", **error.to_json())
        except EnvironmentRaised as error:
            text = encodable("".join(traceback.format_exception(error.__cause__)))
            logger.error("%s", text)
            peer.try_send("failure", text=text[-MAX_TEXT:])
        except Exception:  # one peer's error must not end the others
            logger.exception("A peer at %s could not be served.", self.server_address)
        finally:
            peer.close()

    async def _serve(self, peer: JsonSocket, tick: Callable[[], None]) -> None:
        greeting = greeting_from_json(await next_message(peer, self._limits.handshake_s))
        self._check_caller(greeting.token, {})
        with self._admission.play(), contextlib.ExitStack() as stack:
            with what_environments_raise():
                group = stack.enter_context(self._groups.new(greeting.knows_truncation))
            hello = self.introduce(group)
            peer.send("hello", **hello.to_json())
            link = await receive_lane(peer, hello, GRANT_S)
            if link is None:
                peer.send("no_descriptor")
                return
            with what_environments_raise():
                await play(group, link, tick, greeting.knows_truncation)


class Groups:
    """Makes groups of environments, of which at most `most` exist at a time."""

    def __init__(self, make_group: MakeGroup, most: int) -> None:
        self._make_group = make_group
        self._most = most
        self._places = threading.Semaphore(most)  # lanes and streams have threads of their own

    @contextlib.contextmanager
    def new(self, knows_truncation: bool) -> Iterator[Group]:
        """Yield a new group, and close it afterwards; raise `Refused` if there are too many."""
        if not self._places.acquire(blocking=False):
            raise Refused(
                "UNAVAILABLE",
                f"This server has {self._most} group(s) of environments, and all are in use; wait.",
            )
        try:
            with contextlib.closing(self._make_group(knows_truncation)) as group:
                yield group
        finally:
            self._places.release()


class EnvironmentRaised(Exception):
    """The environments raised an exception, of any class; it is the cause of this one."""


@contextlib.contextmanager
def what_environments_raise() -> Iterator[None]:
    """Raise errors of environments as `EnvironmentRaised`; pass on those of the connection.

    A learner's action that breaks a rule (`BadAnswer`) is raised as `Refused`.
    """
    try:
        yield
    except (LaneClosed, Refused):
        raise
    except BadAnswer as error:
        raise invalid(str(error)) from error
    except Exception as error:
        raise EnvironmentRaised from error


class StreamsBehind:
    """A gRPC server for clients that speak gRPC at a unix socket.

    It has a thread of its own, which starts with the first such client.
    """

    START_S = 30.0
    JOIN_S = 10.0

    def __init__(
        self, make_server: Callable[[Callable[[], None]], Any], tick: Callable[[], None]
    ) -> None:
        """`make_server(tick)` makes the server. `tick` is called while neither thread hangs."""
        self._make_server = make_server
        self._tick = tick
        self._has_ticked = False  # whether the gRPC server has ticked since the last `tick`
        self._server: Any = None
        self._threads: list[threading.Thread] = []
        self._resources = contextlib.ExitStack()
        self._address = ""

    def tick_of_lanes(self) -> None:
        """The lanes' thread calls this at every step, and a few times a second.

        It calls `tick` only if the gRPC server has ticked, too. Otherwise the supervisor would not
        notice that one of the two threads hangs.
        """
        is_serving = self._server is not None and self._server.is_listening.is_set()
        if self._has_ticked or not (is_serving and self._threads[0].is_alive()):
            self._has_ticked = False
            self._tick()

    def _tick_of_streams(self) -> None:
        self._has_ticked = True

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that the caller has accepted; start the server if necessary."""
        from libtorchbeast.rpc import grpc_relay

        if self._server is None:
            server = self._make_server(self._tick_of_streams)  # may raise, at each connection
            self._address = self._resources.enter_context(grpc_relay.private_address())
            self._server = server
            self._start(self._server.run, self._address)
        server, thread = self._server, self._threads[0]
        deadline = time.monotonic() + self.START_S
        while not server.is_listening.is_set():
            if time.monotonic() > deadline:
                raise RuntimeError("gRPC did not start in time.")
            if not thread.is_alive():
                if server is self._server:  # the next connection tries again
                    self._server = None
                    self._threads.clear()
                    self._resources.close()
                raise RuntimeError("gRPC did not start.")
            await pause(0.05)
        thread, *relays = self._threads
        self._threads = [thread, *(relay for relay in relays if relay.is_alive())]
        self._start(asyncio.run, grpc_relay.relay(connection, self._address))

    def _start(self, target: Callable[..., object], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="streams", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        for thread in self._threads:  # relays end with the server
            thread.join(self.JOIN_S)
        self._resources.close()


class Server(EnvironmentServer):
    """Serves environments made by `env_class()`, one for each stream."""

    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str = "unix:/tmp/polybeast",
        security: Security | None = None,
    ) -> None:
        """Environments follow Gymnasium's or old Gym's API; observations may be nests of arrays.

        Learners of this package also get the action masks that environments offer. Code written
        for TorchBeast, which does not know masks, gets the observation alone. The address is
        `unix:/path` or `host:port`; connections from other machines need `security`.
        """

        def make_group(knows_truncation: bool) -> Group:
            return Group(
                lambda _: SyncEnvs(
                    env_class, 1, knows_truncation=knows_truncation, masks=knows_truncation
                ),
                seed=0,  # never used: these environments seed themselves, as in TorchBeast
                rebuild=knows_truncation,
            )

        name = getattr(env_class, "__name__", "environment")
        super().__init__(make_group, server_address, name, security, max_groups=MAX_STREAMS)
