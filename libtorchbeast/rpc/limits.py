"""How much a gateway or a server takes on, and from whom."""

import contextlib
import ipaddress
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libtorchbeast.rpc.handshake import Refused

if TYPE_CHECKING:  # which needs grpc
    from libtorchbeast.rpc.grpc_streams import Watched

MAX_TRACKED_PEERS = 10_000
MAX_TURN_S = 10.0


@dataclass(frozen=True)
class Limits:
    """How much one gateway or server takes on."""

    max_message_bytes: int = 64 << 20
    """Of one message."""
    max_streams: int = 1024
    """Open at once."""
    max_introductions: int = 256
    """Streams that have not introduced themselves; the newest take the place of the oldest."""
    max_stream_envs: int = 1024
    """Environments in one stream."""
    max_client_envs: int = 4096
    """Environments of one client (a host, or a name in certificates), in all its streams."""
    connections_per_s: float = 200.0
    """New streams from one host, in the long run."""
    connections_at_once: int = 1024
    """New streams from one host, in a burst."""
    handshake_s: float = 20.0
    """Until whoever dialled must have introduced itself."""
    build_s: float = 600.0
    """Until environments that we dialled must have: they are made first."""
    step_s: float = 600.0
    """Until environments must have taken a step."""
    rollout_s: float = 600.0
    """Until an actor that carries the model must have sent a rollout."""
    write_s: float = 60.0
    """Until who dialled must have read what was sent to it; who was dialled has `step_s` for it."""
    keepalive_s: float = 10.0
    """Until a silent connection is asked for a heartbeat, and again until it is given up."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")


class Admission:
    """Who may open a stream, who may stay silent in one, and who may play."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rate = ConnectionRate(limits)
        # Their hosts; the oldest stream comes first.
        self._silent: dict[Watched, str] = {}
        self._silent_with_token: dict[Watched, str] = {}
        self._num_playing = 0

    def count(self, stream: "Watched") -> None:
        """Each new stream, before anything else; `Refused` if its host opens too many."""
        self._rate.take(stream.peer)

    @contextlib.contextmanager
    def introduction(self, stream: "Watched", has_token: bool = False) -> Iterator[None]:
        """Until it has introduced itself: apart from those who play, whose places it never takes.

        If there are too many, the oldest of the host that has most of them is ended. Of those who
        have shown the token there may be more: after a learner's restart all come at once.
        """
        limits = self._limits
        silent = self._silent_with_token if has_token else self._silent
        if len(silent) >= (limits.max_streams if has_token else limits.max_introductions):
            [(crowd, _)] = Counter(silent.values()).most_common(1)
            oldest = next(other for other, host in silent.items() if host == crowd)
            del silent[oldest]
            text = "Too many have opened streams and said nothing; introduce yourself at once."
            oldest.end(Refused("RESOURCE_EXHAUSTED", text))
        silent[stream] = host_of(stream.peer)
        try:
            yield
        finally:
            silent.pop(stream, None)

    @contextlib.contextmanager
    def play(self) -> Iterator[None]:
        """While a stream that has introduced itself plays; `Refused` if there is no place."""
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
    """Counts what each host opens; a bucket a host, which refills as time passes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, when
        self._next_turn: dict[str, float] = {}  # of those who are told when to come again

    def take(self, peer: str) -> None:
        """Raise `Refused` if this peer (as grpc names it) opens too many streams."""
        host = host_of(peer)
        now = time.monotonic()
        tokens, then = self._buckets.pop(host, (float(self._limits.connections_at_once), now))
        rate = self._limits.connections_per_s
        tokens = min(tokens + (now - then) * rate, self._limits.connections_at_once)
        # A refusal costs nothing: who is refused and calls again gets through when it is time.
        self._buckets[host] = (tokens if tokens < 1 else tokens - 1, now)
        if len(self._buckets) > MAX_TRACKED_PEERS:
            self._buckets.pop(next(iter(self._buckets)))  # whoever was silent the longest
        if tokens < 1:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A host may open {rate:g} streams a second, got more from {host}; wait a little.",
                self._turn_of(host, now) - now,
            )

    def _turn_of(self, host: str, now: float) -> float:
        """One after the other, as fast as they may come, so that each needs to ask once more."""
        turn = max(now, self._next_turn.pop(host, now)) + 1 / self._limits.connections_per_s
        self._next_turn[host] = turn if turn < now + MAX_TURN_S else now
        if len(self._next_turn) > MAX_TRACKED_PEERS:
            self._next_turn.pop(next(iter(self._next_turn)))
        return turn


def host_of(peer: str) -> str:
    """The host of a peer, as grpc names it; of IPv6 the network, as a host has all of a /64."""
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
    """For the end that dials: find out when the other is gone, and try again soon."""
    return [
        *_common_options(limits),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of one's own
        ("grpc.enable_retries", 0),
    ]


def server_options(limits: Limits, share_port: bool = False) -> list[tuple[str, Any]]:
    """For the end that listens."""
    return [
        *_common_options(limits),
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * limits.keepalive_s)),
        ("grpc.http2.max_ping_strikes", 0),  # a learner that thinks for a while is no attack
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.so_reuseport", int(share_port)),
    ]


def _common_options(limits: Limits) -> list[tuple[str, Any]]:
    keepalive_ms = int(1000 * limits.keepalive_s)
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.max_frame_size", 1 << 20),  # pieces of 16 KiB take both ends more time
        # A message that is small on the wire must not be large in memory.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),  # of pings for other purposes
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
