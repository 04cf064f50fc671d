"""How much a gateway or a server takes on, and from whom."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from libtorchbeast.rpc.handshake import Refused

MAX_TRACKED_PEERS = 10_000


@dataclass(frozen=True)
class Limits:
    """How much one gateway or server takes on."""

    max_message_bytes: int = 64 << 20
    """Of one message."""
    max_streams: int = 1024
    """Open at once."""
    connections_per_s: float = 200.0
    """New streams from one host, in the long run."""
    connections_at_once: int = 1024
    """New streams from one host, in a burst."""
    handshake_s: float = 20.0
    """Until somebody who dialled must have introduced himself."""
    build_s: float = 600.0
    """Until environments that we dialled must have: they are made first."""
    step_s: float = 600.0
    """Until environments must have taken a step."""
    write_s: float = 60.0
    """Until the other end must have read what was sent to it."""
    keepalive_s: float = 10.0
    """Until a silent connection is asked for a heartbeat, and again until it is given up."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")


class Admission:
    """Who may open a stream: a rate for each host, places, and few for those without a token."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rate = ConnectionRate(limits)
        self._most_unauthenticated = max(1, limits.max_streams // 2)
        self._unauthenticated: Counter[str] = Counter()  # of each host
        self._num_streams = 0

    @contextlib.contextmanager
    def stream(self, peer: str) -> Iterator[None]:
        """While a peer (as grpc names it) has a stream; `Refused` if it may have none now."""
        if self._num_streams >= self._limits.max_streams:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"This end takes {self._limits.max_streams} streams, and all are in use.",
            )
        self._rate.take(peer)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @contextlib.contextmanager
    def unauthenticated(self, peer: str) -> Iterator[None]:
        """Until it has introduced itself: nobody may take all places without a word."""
        host = host_of(peer)
        if self._unauthenticated[host] >= self._most_unauthenticated:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"{self._most_unauthenticated} streams from {host} have not introduced themselves; "
                "wait.",
            )
        self._unauthenticated[host] += 1
        try:
            yield
        finally:
            self._unauthenticated[host] -= 1
            self._unauthenticated += Counter()  # forget those with none


class ConnectionRate:
    """Counts what each host opens; a bucket a host, which refills as time passes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, when

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
            )


def host_of(peer: str) -> str:
    """The host of a peer, as grpc names it."""
    return peer if peer.startswith("unix") else peer.rpartition(":")[0]


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
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.http2.ping_timeout_ms", keepalive_ms),  # of pings for other purposes
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
