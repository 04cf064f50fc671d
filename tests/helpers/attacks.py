"""A learner under attack, with a client beside it that must not notice; and fake learners."""

import concurrent.futures
import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import grpc
import psutil

from libtorchbeast.rpc.address import listen_unix
from libtorchbeast.rpc.messages import LEARNER_METHOD, token_metadata
from libtorchbeast.rpc.security import Security
from tests.helpers.counting import Counting
from tests.helpers.remote import Learner, check_rollouts, client, learner
from tests.helpers.threads import run_in_threads, wait_until

THINK_S = 0.002  # else a bystander takes all of a core for as long as an attack lasts


class Bystander:
    """The client beside an attack: its environments, and what the learner got of them."""

    def __init__(self, it: Learner, num_envs: int) -> None:
        it.think_s = THINK_S
        it.wait_for_environments(num_envs)
        self._it = it
        self.ids = {_id_of(rollout) for rollout in list(it.rollouts)}
        self._rollouts: list[Any] = []
        self._num_seen = 0  # of all rollouts

    @property
    def rollouts(self) -> list[Any]:
        new = self._it.rollouts[self._num_seen :]
        self._num_seen += len(new)
        self._rollouts += [rollout for rollout in new if _id_of(rollout) in self.ids]
        return self._rollouts

    def plays_on(self, number: int = 3) -> None:
        """While this test is where it is: so many more of its rollouts come."""
        wanted = len(self.rollouts) + number
        wait_until(lambda: len(self.rollouts) >= wanted or bool(self._it.errors), 100)

    def check(self, one_stream: bool) -> None:
        """Every row is right; if it has had one stream, nothing is missing and nothing padded."""
        rollouts = list(self.rollouts)
        assert set(check_rollouts(rollouts, self._it.unroll_length)) == self.ids
        if not one_stream:
            return
        assert not any(rows["truncated"].any() for rows, _, _ in rollouts)
        firsts = [rows["done"][0, 0] and rows["episode_step"][0, 0] == 0 for rows, _, _ in rollouts]
        assert sum(firsts) == len(self.ids), "one stream, from the start to the end"


def _id_of(rollout: Any) -> int:
    return int(rollout[0]["frame"][0, 0, 0])


@contextlib.contextmanager
def under_attack(
    security: Security | None = None,
    client_security: Security | None = None,
    num_envs: int = 1,
    one_stream: bool = True,
    **options: Any,
) -> Iterator[Learner]:
    """The learner, with `it.bystander`, a client that must not notice; nothing may die.

    With limits so tight that a busy machine may break them it has not `one_stream` to the end.
    """
    options.setdefault("listen", ["127.0.0.1:0"])
    security = security or Security()
    with learner(security=security, **options) as it:
        with client(it.address, num_envs, security=client_security or security):
            it.bystander = Bystander(it, num_envs)
            pids = it.gateways.pids
            yield it
            it.bystander.plays_on(5 * num_envs)
            it.bystander.check(one_stream)
        assert it.gateways.pids == pids
        assert it.gateways.supervisor.num_restarts == 0


class Recording(Counting):
    """Keeps the actions that reach it."""

    made: ClassVar[list[int]] = []
    taken: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self.id)

    def step(self, action: Any) -> Any:
        self.taken.append(int(action))
        return super().step(action)

    @classmethod
    def forget(cls) -> "type[Recording]":
        """As at the start of a test."""
        cls.made.clear()
        cls.taken.clear()
        return cls


def address_of(kind: str, folder: Path) -> str:
    """Where to listen: at a port, or at a socket in a folder."""
    return "127.0.0.1:0" if kind == "tcp" else f"unix:{folder}/socket"


def rss_of(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


@contextlib.contextmanager
def grows_by_less_than(mib: int, pid: int) -> Iterator[None]:
    """At no moment does a process take so much more memory."""
    before, largest, over = rss_of(pid), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            largest[0] = max(largest[0], rss_of(pid))

    with run_in_threads(watch):
        try:
            yield
        finally:
            over.set()
    assert largest[0] - before < mib << 20


class FakeProxy:
    """Listens on loopback, keeps what it gets, and answers nothing."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                with contextlib.suppress(OSError):
                    self.received.append(connection.recv(1 << 16))

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator["FakeProxy"]:
        proxy = cls()
        proxy._thread.start()
        try:
            yield proxy
        finally:
            proxy._listener.shutdown(socket.SHUT_RDWR)
            proxy._listener.close()
            proxy._thread.join(30)


@contextlib.contextmanager
def fake_end(
    answers: list[bytes],
    status: grpc.StatusCode | None = None,
    method: tuple[str, str] = LEARNER_METHOD,
    compression: grpc.Compression | None = None,
) -> Iterator[str]:
    """The address of a learner, or of environments that listen, if `method` is theirs.

    It answers each message of a stream with the next of these, then is silent, or ends the stream
    with `status`.
    """

    def play(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for _, answer in zip(requests, answers, strict=False):
            yield answer
        if status is not None:
            context.abort(status, "No, thank you.")
        for _ in requests:
            pass

    pool = concurrent.futures.ThreadPoolExecutor(8)
    server = grpc.server(pool, compression=compression)
    service, name = method
    handler = grpc.stream_stream_rpc_method_handler(play)
    handlers = grpc.method_handlers_generic_handler(service, {name: handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(30)
        pool.shutdown(wait=False)


@contextlib.contextmanager
def fake_local_learner(folder: Path, answers: list[bytes]) -> Iterator[str]:
    """The same at a unix socket: whoever dials is sent these bytes."""
    address = f"unix:{folder}/socket"
    connections = []
    listener = listen_unix(address)
    listener.setblocking(True)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                connection.sendall(b"".join(answers))

    with run_in_threads(accept):
        try:
            yield address
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def silent_streams(
    address: str, number: int, method: tuple[str, str] = LEARNER_METHOD, token: str = ""
) -> Iterator[list[Any]]:
    """Calls in which nothing is said."""
    silence: queue.SimpleQueue[None] = queue.SimpleQueue()
    metadata = token_metadata(token)
    path = "/" + "/".join(method)
    with contextlib.ExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
        channels = [stack.enter_context(grpc.insecure_channel(address, own)) for _ in range(number)]
        calls = [
            channel.stream_stream(path)(iter(silence.get, None), metadata=metadata)
            for channel in channels
        ]
        try:
            yield calls
        finally:
            for call in calls:
                call.cancel()
                silence.put(None)


def send_path(address: str, path: bytes) -> bytes:
    """A gRPC request for any path, in HTTP/2 frames of our own; what came back first."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
        return head + payload

    headers = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"x",
        b"te": b"trailers",  # codespell:ignore te
        b"content-type": b"application/grpc",
    }
    fields = [
        bytes([0, len(name)]) + name + bytes([len(value)]) + value
        for name, value in headers.items()
    ]
    settings, end_headers = 4, 4
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(settings, 0, 0, b"")
            + frame(1, end_headers, 1, b"".join(fields))
        )
        return connection.recv(1 << 12)
