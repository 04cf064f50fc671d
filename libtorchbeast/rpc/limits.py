"""Limits of a gateway or an environment server: sizes, numbers and rates of streams, and times."""

import contextlib
import ipaddress
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libtorchbeast.rpc.handshake import Refused

if TYPE_CHECKING:  # only then: the import needs grpc
    from libtorchbeast.rpc.grpc_streams import Watched

MAX_TRACKED_PEERS = 10_000
MAX_TURN_S = 10.0  # until the latest turn that a refused host is given


@dataclass(frozen=True)
class Limits:
    """The limits of one gateway or environment server."""

    max_message_bytes: int = 64 << 20
    """Size of one message."""
    max_streams: int = 1024
    """Streams that play at a time."""
    max_introductions: int = 256
    """Streams without a token that have not introduced themselves; a new one ends the oldest."""
    max_stream_envs: int = 1024
    """Environments in one stream."""
    max_client_envs: int = 4096
    """Environments of one client (a host, or a name in certificates), in all its streams."""
    connections_per_s: float = 200.0
    """New streams per second from one host, in the long run."""
    connections_at_once: int = 1024
    """New streams from one host, in a burst."""
    handshake_s: float = 20.0
    """Seconds until a client that dials must have introduced itself."""
    build_s: float = 600.0
    """The same for environments that this end dials, which are made first."""
    step_s: float = 600.0
    """Seconds until environments must have taken a step."""
    rollout_s: float = 600.0
    """Seconds until an actor that carries the model must have sent a rollout."""
    write_s: float = 60.0
    """Seconds until a client must have read a message; a server that is dialled has `step_s`."""
    keepalive_s: float = 10.0
    """Seconds until a silent connection is pinged, and then until it is given up."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")


class Admission:
    """Decides which streams may be opened, may wait to introduce themselves, and may play."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rate = ConnectionRate(limits)
        # The hosts of streams that have not introduced themselves; the oldest stream comes first.
        self._silent: dict[Watched, str] = {}
        self._silent_with_token: dict[Watched, str] = {}
        self._num_playing = 0

    def count(self, stream: "Watched") -> None:
        """Count a new stream, before anything else; raise `Refused` if its host opens too many."""
        self._rate.take(stream.peer)

    @contextlib.contextmanager
    def introduction(self, stream: "Watched", has_token: bool = False) -> Iterator[None]:
        """Count a stream until it has introduced itself, apart from the streams that play.

        If there are too many, the oldest one of the host that has the most is ended. More are
        allowed with the token, as all clients dial at once after a learner's restart.
        """
        limits = self._limits
        silent = self._silent_with_token if has_token else self._silent
        if len(silent) >= (limits.max_streams if has_token else limits.max_introductions):
            [(crowd, _)] = Counter(silent.values()).most_common(1)
            oldest = next(other for other, host in silent.items() if host == crowd)
            del silent[oldest]
            text = "Too many streams have sent no first message, so this one ends; send it at once."
            oldest.end(Refused("RESOURCE_EXHAUSTED", text))
        silent[stream] = host_of(stream.peer)
        try:
            yield
        finally:
            silent.pop(stream, None)

    @contextlib.contextmanager
    def play(self) -> Iterator[None]:
        """Count a stream while it plays; raise `Refused` if there are too many."""
        if self._num_playing >= self._limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"This end takes {self._limits.max_streams} streams, and all are in use.",
            )
        self._num_playing += 1
        try:
            yield
        finally:
            self._num_playing -= 1


class ConnectionRate:
    """Limits the rate of new streams from each host, by one token bucket a host."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and when they were counted
        self._next_turn: dict[str, float] = {}  # the last turn given to a host that was refused

    def take(self, peer: str) -> None:
        """Raise `Refused` if this peer (as grpc names it) opens too many streams."""
        host = host_of(peer)
        now = time.monotonic()
        tokens, then = self._buckets.pop(host, (float(self._limits.connections_at_once), now))
        rate = self._limits.connections_per_s
        tokens = min(tokens + (now - then) * rate, self._limits.connections_at_once)
        # A refusal takes no token, so a host that keeps dialing gets through once there is one.
        self._buckets[host] = (tokens if tokens < 1 else tokens - 1, now)
        if len(self._buckets) > MAX_TRACKED_PEERS:
            self._buckets.pop(next(iter(self._buckets)))  # the host that dialled least recently
        if tokens < 1:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A host may open {rate:g} streams a second, got more from {host}; wait a little.",
                self._turn_of(host, now) - now,
            )

    def _turn_of(self, host: str, now: float) -> float:
        """Return when a refused stream may dial again.

        A host's streams get turns at the allowed rate, so that each needs to dial only once more.
        """
        turn = max(now, self._next_turn.pop(host, now)) + 1 / self._limits.connections_per_s
        self._next_turn[host] = turn if turn < now + MAX_TURN_S else now
        if len(self._next_turn) > MAX_TRACKED_PEERS:
            self._next_turn.pop(next(iter(self._next_turn)))
        return turn


def host_of(peer: str) -> str:
    """Return the host of a peer (as grpc names it); of an IPv6 address, the /64 network.

    A single host may use all addresses of a /64.
    """
    kind, _, rest = peer.partition(":")
    if kind != "ipv6":
        return peer if kind == "unix" else peer.rpartition(":")[0]
    text = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return peer.rpartition(":")[0]
    if address.ipv4_mapped is not None:
        return f"ipv4:{address.ipv4_mapped}"
    return f"ipv6:{ipaddress.IPv6Network((address, 64), strict=False)}"


def channel_options(limits: Limits) -> list[tuple[str, Any]]:
    """Return gRPC's options for the end that dials."""
    return [
        *_common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),  # channels do not share a connection
        ("grpc.enable_retries", 0),
    ]


def server_options(limits: Limits, share_port: bool = False) -> list[tuple[str, Any]]:
    """Return gRPC's options for the end that listens."""
    return [
        *_common_options(limits),
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * limits.keepalive_s)),
        ("grpc.http2.max_ping_strikes", 0),  # pings of a peer that waits are no attack
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.so_reuseport", int(share_port)),
    ]


def _common_options(limits: Limits) -> list[tuple[str, Any]]:
    keepalive_ms = int(1000 * limits.keepalive_s)
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.max_frame_size", 1 << 20),  # the default, 16 KiB, takes both ends more time
        # No compression: a message that is small on the wire must not be large in memory.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),  # of pings for other purposes
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
