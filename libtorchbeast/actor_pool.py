"""`ActorPool`: actors in C++ threads, one for each lane."""

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import nest
from libtorchbeast import _C
from libtorchbeast.episode_info import InfoSums, add_sums
from libtorchbeast.rollout_layout import ModelOffer
from libtorchbeast.rows import TORCHBEAST_FIELDS
from libtorchbeast.shared_lanes import AGENT, ENVIRONMENT, Lane

if TYPE_CHECKING:
    from libtorchbeast.rpc.security import Security

POLL_S = 0.1
JOIN_S = 30.0
MAX_GROUP = 1 << 32  # more than the environments of any lane: source = lane * MAX_GROUP + number
MAX_LANES = 10_000  # at most so many are remembered: clients may come and go for ever


class ActorPool(_C.ActorPool):
    """Carries rows and actions between lanes and agent, and rollouts to the learner.

    The agent consumes `inference_batcher`: it gets `(row, agent_state)`, all [1, B, ...], and
    answers `(output, new_agent_state)`, where output has an "action". The learner consumes
    `learner_queue`: it gets `((rows, outputs), agent_state)` with T+1 rows, where output t led to
    row t, and the agent's state before row 0. A row is a dict (rows.py), and so is an output. The
    field `source` of a row has a number for each environment; `name_source` turns it into a name.

    For environments at `env_server_addresses` both are tuples, as in TorchBeast: a row is
    (frame, reward, done, episode_step, episode_return), an output (action, ...).
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: _C.BatchingQueue,
        inference_batcher: _C.DynamicBatcher,
        env_server_addresses: Sequence[str] = (),
        initial_agent_state: Any = (),
        security: "Security | None" = None,
    ) -> None:
        """Each address is `unix:/path` or `host:port`; one stream to a `Server` for each entry."""
        super().__init__(unroll_length, learner_queue, inference_batcher, initial_agent_state)
        self._unroll_length = unroll_length
        self._initial_state = initial_agent_state
        self._addresses = list(env_server_addresses)
        self._security = security
        self.offer_model: Callable[[], ModelOffer] | None = None
        """Returns what actors that carry the model need; None: the learner accepts none."""
        self._num_lanes = 0
        self._numbers = itertools.count(1)
        self._clients = {"": 0}  # the number of each client in the queues; never reused
        self._client_of_lane: dict[int, str] = {}
        self._lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
        self._taken: weakref.WeakKeyDictionary[Lane, InfoSums] = weakref.WeakKeyDictionary()

    def add_lane(self, lane: Lane) -> None:  # type: ignore[override]
        """Start an actor for a lane. Whole rollouts (`has_rollouts`) go straight to the learner."""
        number, self._num_lanes = self._num_lanes, self._num_lanes + 1
        self._lanes[number] = lane
        self._remember_client(number, lane.client)
        # Not in the lane's memory: a constant array that the actor copies like a field of the row.
        source = number * MAX_GROUP + np.arange(lane.num_envs, dtype=np.int64)
        if not lane.has_rollouts:
            self._add(lane, {**lane.rows, "source": source})
            return
        parts = nest.map(lambda array: array.swapaxes(0, 1), lane.rows)  # [T+1, K, ...]
        rows = {**parts["rows"], "source": np.tile(source, (self._unroll_length + 1, 1))}
        state = nest.pack_as(self._initial_state, list(parts["state"]))
        rollout = ((rows, parts["outputs"]), state)
        client = self._number_of(lane.client)
        super().add_lane(lane.turn, rollout, (), lane.wakeup_fd, client, has_rollouts=True)

    @property
    def brings_rollouts(self) -> bool:
        """Whether an actor that carries the model, and so sends whole rollouts, is connected."""
        lanes = [lane for lane in list(self._lanes.values()) if lane.has_rollouts]
        return any(lane.turn.state in (AGENT, ENVIRONMENT) for lane in lanes)

    def client_of(self, source: int) -> str:
        """The client (`Lane.client`) of the environment that a row's `source` number denotes."""
        return self._client_of_lane.get(source // MAX_GROUP, "")

    def name_source(self, source: int) -> str:
        """A readable name, for logs, of the environment that a row's `source` number denotes."""
        number, environment = divmod(source, MAX_GROUP)
        lane = self._lanes.get(number)
        who = lane.name if lane is not None and lane.name else f"lane {number}"
        return f"environment {environment} of {who}"

    def take_info(self) -> InfoSums:
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        news: InfoSums = {}
        for lane in list(self._lanes.values()):
            now, before = lane.read_info(), self._taken.get(lane, {})
            if now is before:
                continue
            self._taken[lane] = now
            for name, (total, count) in now.items():
                old_total, old_count = before.get(name, (0.0, 0))
                if count > old_count:  # without a limit: lanes do not compete for places
                    add_sums(news, {name: (total - old_total, count - old_count)}, most=None)
        return news

    def run(self) -> None:
        """Wait until a queue is closed and all actors have ended; raise an actor's exception.

        With addresses, an exception in an environment is raised here as RuntimeError. A server
        that is not up yet, or goes away, is dialled until it answers.
        """
        if not self._addresses:
            super().run()
            return
        from libtorchbeast.rpc.gateway_config import GatewaysConfig
        from libtorchbeast.rpc.gateway_processes import Gateways
        from libtorchbeast.rpc.security import Security

        errors: list[BaseException] = []
        config = GatewaysConfig(
            server_addresses=self._addresses,
            security=self._security or Security(),
            knows_truncation=False,
            rows_per_rollout=self._unroll_length + 1,
        )
        gateways = Gateways(
            config, on_environment_error=lambda text: errors.append(RuntimeError(text))
        )
        gateways.open()
        gateways.start(
            lambda lane: self._add(lane, tuple(lane.rows[name] for name in TORCHBEAST_FIELDS))
        )
        ended = threading.Event()

        def watch() -> None:
            try:
                while not errors and not ended.wait(POLL_S):
                    gateways.poll()
            except BaseException as error:
                errors.append(error)
            if errors:
                self.close()

        watcher = threading.Thread(target=watch, name="gateways")
        watcher.start()
        try:
            super().run()
        finally:
            ended.set()
            watcher.join(JOIN_S)
            gateways.close()
        if errors:
            raise errors[0]

    def _add(self, lane: Lane, row: Any) -> None:
        rows = nest.map(lambda array: array[None], row)  # [K, ...] -> [1, K, ...]
        actions = nest.map(lambda array: array[None], lane.actions)
        client = self._number_of(lane.client)
        super().add_lane(
            lane.turn, rows, actions, lane.wakeup_fd, client, marks_rows=lane.marks_rows
        )

    def _remember_client(self, number: int, client: str) -> None:
        """Remember a lane's client, also after the lane is gone: rollouts may still be queued."""
        self._client_of_lane[number] = sys.intern(client)
        if len(self._client_of_lane) > MAX_LANES:
            gone = next((n for n in self._client_of_lane if n not in self._lanes), None)
            if gone is not None:
                del self._client_of_lane[gone]

    def _number_of(self, client: str) -> int:
        """The number of a client in the queues; a client without one gets the next."""
        if client not in self._clients:
            self._clients[client] = next(self._numbers)
            if len(self._clients) > MAX_LANES:
                here = {"", client, *(lane.client for lane in list(self._lanes.values()))}
                self._clients = {c: n for c, n in self._clients.items() if c in here}
        return self._clients[client]
