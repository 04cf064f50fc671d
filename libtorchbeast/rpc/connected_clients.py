"""Whose streams a gateway has: how much of each client is taken, and what became of it.

A client is whoever the streams with one certificate, or else from one host, belong to. The learner
gives each the same share, however many streams and environments it has.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libtorchbeast.rpc.handshake import FINISHED, Hello, Refused
from libtorchbeast.rpc.limits import Limits, host_of
from libtorchbeast.text import printable

if TYPE_CHECKING:  # the learner imports this file, and neither grpc nor protobuf
    from libtorchbeast.rpc.grpc_streams import Watched

MAX_CLIENTS = 1000  # that are remembered
MAX_NEWS = 50  # clients in one look
NO_TOKEN = "(without the token)"  # all of them are one


@dataclass
class ClientFigures:
    """Of one client, since it came first; times are those of `time.time()`."""

    key: str
    """What makes it the same client."""
    name: str
    address: str
    since: float
    streams: int = 0
    environments: int = 0
    refused: int = 0
    """Streams that were refused, or ended for what they sent."""
    lost: int = 0
    """Streams that the other end left, or that broke: gRPC does not always say which."""
    unsent: int = 0
    """Rollouts that its actors did not send, as the weights they had acted with were too old."""

    def merged(self, other: "ClientFigures") -> "ClientFigures":
        """With those of the same client at another gateway."""
        names = ("streams", "environments", "refused", "lost", "unsent")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return dataclasses.replace(self, since=min(self.since, other.since), **sums)


def client_of(stream: "Watched") -> str:
    """Who is at the other end: the name in its certificate, or else its host."""
    if stream.certified_name:
        return f"name:{stream.certified_name}"
    return "unix:" if stream.peer.startswith("unix:") else host_of(stream.peer)


class Clients:
    """Those of one gateway."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clients: dict[str, ClientFigures] = {}
        self._changed: set[str] = set()

    def check(self, stream: "Watched", hello: Hello) -> None:
        """`Refused` if these environments are more than a stream or a client may have."""
        limits = self._limits
        figures = self._clients.get(client_of(stream))
        others = figures.environments if figures is not None else 0
        if hello.num_envs > limits.max_stream_envs:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A stream may have {limits.max_stream_envs} environments, got {hello.num_envs}; "
                "put fewer in a stream, or raise the learner's --max_stream_envs.",
            )
        if others + hello.num_envs > limits.max_client_envs:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A client may have {limits.max_client_envs} environments, got {hello.num_envs} "
                f"more than the {others} there are; raise the learner's --max_client_envs.",
            )

    @contextlib.contextmanager
    def playing(self, stream: "Watched", hello: Hello) -> Iterator[None]:
        """While these environments play, or wait for it; `Refused` if they are too many."""
        self.check(stream, hello)
        figures = self._figures(client_of(stream), stream, printable(hello.name))
        figures.streams += 1
        figures.environments += hello.num_envs
        is_lost = True
        try:
            yield
        except Refused as error:
            is_lost = error.code == "DEADLINE_EXCEEDED"
            raise
        finally:
            figures.lost += is_lost
            figures.streams -= 1
            figures.environments -= hello.num_envs
            self._changed.add(figures.key)

    def count_unsent(self, stream: "Watched", number: int) -> None:
        """Rollouts of which an actor says that it kept them."""
        self._figures(client_of(stream), stream).unsent += number

    def count_refusal(self, stream: "Watched", error: Refused) -> None:
        """Of what it is or sent; not because the learner ends, or it was silent."""
        if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", FINISHED):
            return
        if stream.is_authenticated:
            figures = self._figures(client_of(stream), stream)
        else:
            figures = self._figures(NO_TOKEN, stream)
            figures.name, figures.address = NO_TOKEN, host_of(stream.peer)  # the last one's
        figures.refused += 1

    def take_news(self) -> list[dict[str, Any]]:
        """Figures that have changed since the last call, of a few clients at a time."""
        keys = [self._changed.pop() for _ in range(min(MAX_NEWS, len(self._changed)))]
        return [dataclasses.asdict(self._clients[key]) for key in keys if key in self._clients]

    def _figures(self, key: str, stream: "Watched", name: str = "") -> ClientFigures:
        figures = self._clients.get(key)
        if figures is None:
            make_room(self._clients)
            address = host_of(stream.peer)
            figures = ClientFigures(key, stream.certified_name or name, address, time.time())
            self._clients[key] = figures
        self._changed.add(key)
        return figures


def make_room(clients: dict[str, ClientFigures]) -> None:
    """For one more: forget whoever came first of those that have left, if there are too many."""
    if len(clients) >= MAX_CLIENTS:
        gone = next((key for key, figures in clients.items() if figures.streams == 0), None)
        if gone is not None:
            del clients[gone]
