"""The clients of a gateway: limits on their environments, and figures about their streams.

A client is the set of all streams with one name in their certificates, or else from one host. The
learner gives each client the same share, however many streams and environments it has.
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

if TYPE_CHECKING:  # the learner imports this file, but neither grpc nor protobuf
    from libtorchbeast.rpc.grpc_streams import Watched

MAX_CLIENTS = 1000  # whose figures are kept
MAX_NEWS = 50  # clients whose figures `take_news` returns at a time
NO_TOKEN = "(without the token)"  # one client, which stands for all peers without the token


@dataclass
class ClientFigures:
    """Figures about one client since it first connected, at the `time.time()` of `since`."""

    key: str
    """Identifies the client, as `client_of` does."""
    name: str
    address: str
    since: float
    streams: int = 0
    environments: int = 0
    refused: int = 0
    """Streams that were refused, or ended because of the data that they sent."""
    lost: int = 0
    """Streams that the client left, or that broke: gRPC does not always say which."""
    unsent: int = 0
    """Rollouts that the client's actors did not send because their weights were too old."""

    def merged(self, other: "ClientFigures") -> "ClientFigures":
        """Return the sum of these figures and those of the same client at another gateway."""
        names = ("streams", "environments", "refused", "lost", "unsent")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return dataclasses.replace(self, since=min(self.since, other.since), **sums)


def client_of(stream: "Watched") -> str:
    """Return the key of a stream's client: the name in its certificate, or else its host."""
    if stream.certified_name:
        return f"name:{stream.certified_name}"
    return "unix:" if stream.peer.startswith("unix:") else host_of(stream.peer)


class Clients:
    """The clients of one gateway."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._clients: dict[str, ClientFigures] = {}
        self._changed: set[str] = set()

    def check(self, stream: "Watched", hello: Hello) -> None:
        """Raise `Refused` if these environments are too many for a stream or for their client."""
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
        """Count environments for their client while they play, or wait for a lane.

        Raise `Refused` if they are too many.
        """
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
        """Count rollouts that an actor reports as not sent."""
        self._figures(client_of(stream), stream).unsent += number

    def count_refusal(self, stream: "Watched", error: Refused) -> None:
        """Count a refused stream, unless the learner is ending or the client missed a deadline."""
        if error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", FINISHED):
            return
        if stream.is_authenticated:
            figures = self._figures(client_of(stream), stream)
        else:
            figures = self._figures(NO_TOKEN, stream)
            figures.name, figures.address = NO_TOKEN, host_of(stream.peer)  # the last peer's
        figures.refused += 1

    def take_news(self) -> list[dict[str, Any]]:
        """Return figures that have changed since the last call, of `MAX_NEWS` clients at most."""
        keys = [self._changed.pop() for _ in range(min(MAX_NEWS, len(self._changed)))]
        return [dataclasses.asdict(self._clients[key]) for key in keys if key in self._clients]

    def _figures(self, key: str, stream: "Watched", name: str = "") -> ClientFigures:
        """Return a client's figures, which the caller changes; new ones if it is not known yet."""
        figures = self._clients.get(key)
        if figures is None:
            make_room(self._clients)
            address = host_of(stream.peer)
            figures = ClientFigures(key, stream.certified_name or name, address, time.time())
            self._clients[key] = figures
        self._changed.add(key)
        return figures


def make_room(clients: dict[str, ClientFigures]) -> None:
    """Make room for one more client: if there are too many, forget the oldest without streams."""
    if len(clients) >= MAX_CLIENTS:
        gone = next((key for key, figures in clients.items() if figures.streams == 0), None)
        if gone is not None:
            del clients[gone]
