"""A gateway's connection to the learner, which grants lanes, stops gateways, and gets reports."""

import asyncio
import contextlib
import os
import random
import socket
import traceback
from collections.abc import Iterator
from typing import Any

from libtorchbeast.json_socket import JsonSocket
from libtorchbeast.log_repeats import RepeatFilter
from libtorchbeast.rollout_layout import ModelOffer
from libtorchbeast.rpc.connected_clients import Clients
from libtorchbeast.rpc.grpc_streams import Watched
from libtorchbeast.rpc.handshake import (
    MAX_TEXT,
    Hello,
    Refused,
    learner_is_ending,
    refusal_from_json,
)
from libtorchbeast.rpc.lane_pool import LanePool
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.weights import Publication

MAX_REASON = 200  # characters of the reason why an address has no stream


class LearnerConnection:
    """A socket to the learner's process, and the lanes that were received over it."""

    def __init__(self, control_fd: int, wakeup_fd: int, limits: Limits) -> None:
        self.limits = limits
        self.clients = Clients(limits)
        self._socket = JsonSocket(socket.socket(fileno=control_fd))
        self.lanes = LanePool(wakeup_fd, lambda **request: self.send("lane", **request))
        self.publication: Publication | None = None  # the weights, once an actor has connected
        self._offer: ModelOffer | None = None
        self.stopped = asyncio.Event()
        self._is_finished = False
        self._texts = RepeatFilter()
        self._num_playing = 0
        self._waiting: dict[str, str] = {}  # addresses without a stream, and why

    def start(self) -> None:
        self.lanes.start()
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read_messages)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the learner; if it is gone, stop the gateway."""
        if "text" in values:  # a peer may have sent it, at any length
            values["text"] = values["text"][-MAX_TEXT:]
        try:
            self._socket.send(kind, **values)
        except OSError:
            self.stopped.set()

    def report(
        self, text: str, peer: str, kind: str = "warning", texts: RepeatFilter | None = None
    ) -> None:
        """Send a text for the learner's log; `texts` limits how often it is repeated there."""
        shown = (texts or self._texts).take(text)
        if shown is not None:
            self.send(kind, text=shown, peer=peer)

    def report_lost_error(self, loop: Any, context: dict[str, Any]) -> None:
        """Report an exception of a task that no other task awaits: asyncio's exception handler."""
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self.report("".join([*lines, context["message"]]), "gateway")

    def ending(self) -> Refused:
        """Return the refusal for streams whose lane the learner has closed.

        Unread messages are read first, as they may say that training is finished.
        """
        self._read_messages()
        # A random time, so that not all clients dial again at the same moment.
        spread_s = self._num_playing / self.limits.connections_per_s
        return learner_is_ending(self._is_finished, random.uniform(0.0, spread_s))

    @contextlib.contextmanager
    def playing(self, hello: Hello, stream: Watched) -> Iterator[None]:
        """Count a stream as one that plays, and report to the learner that it has joined."""
        self._waiting.pop(stream.peer, None)
        self._num_playing += 1
        self._send_counts()
        self.report(f"{hello.name} joined, {hello.num_envs} in a stream.", stream.peer, "info")
        try:
            yield
        finally:
            self._num_playing -= 1
            self._send_counts()

    def send_news(self) -> None:
        """Send figures of clients that have changed; called a few times a second."""
        for figures in self.clients.take_news():
            self.send("client", **figures)

    def wait_for(self, address: str, why: str) -> None:
        """Inform the learner why no environments play at an address that is dialled."""
        why = why[:MAX_REASON]
        if self._waiting.get(address) != why:
            self._waiting[address] = why
            self._send_counts()

    def _send_counts(self) -> None:
        self.send("streams", number=self._num_playing, waiting=self._waiting)

    def _take_lane(self, message: dict[str, Any]) -> None:
        values = {name: message[name] for name in ("id", "fd", "spec", "num_envs")}
        if message["rollouts"] and self._offer is not None:
            values["rollout"] = self._offer.rollout
            if self.publication is None and values["fd"] is not None:  # useless without weights
                os.close(values["fd"])
                values["fd"] = None
        if not self.lanes.grant(**values):
            self.send("lost", id=message["id"])

    def _take_model(self, message: dict[str, Any]) -> None:
        """Accept the offer of the model, with the memory of its weights, unless this end has it.

        The learner sends it before the first lane for rollouts, and again after any lane was lost.
        """
        if self.publication is not None:
            if message["fd"] is not None:
                os.close(message["fd"])
            return
        self._offer = ModelOffer.from_json(message["offer"])
        if message["fd"] is not None:
            with contextlib.suppress(OSError):  # no descriptor is left to map it with
                self.publication = Publication(message["fd"], self._offer)

    def _read_messages(self) -> None:
        try:
            while (message := self._socket.next()) is not None:
                kind = message["kind"]
                if kind == "lane":
                    self._take_lane(message)
                elif kind == "model":
                    self._take_model(message)
                elif kind == "refuse":
                    self.lanes.refuse(message["id"], refusal_from_json(message))
                else:
                    assert kind == "stop"
                    self._is_finished = self._is_finished or message["finished"]
                    self.stopped.set()
        except EOFError:
            self.stopped.set()
