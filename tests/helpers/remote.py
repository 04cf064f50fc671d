"""Helpers for tests of remote environments: a small learner, and a check of what it got."""

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

import libtorchbeast
import nest
from libtorchbeast.rpc.env_client import EnvironmentClient
from libtorchbeast.rpc.env_server import EnvironmentServer
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from tests.helpers.counting import EPISODE_STEPS, Counting, counting_group, next_action
from tests.helpers.threads import wait_until


class Learner:
    """An agent and a learner that keep what they get; polls like a main thread would."""

    def __init__(
        self,
        unroll_length: int = 4,
        hold: bool = False,
        check_first: Any = None,
        agent: Any = next_action,
        batch_size: int = 1,
        update_s: float = 0.0,
        looks_at_rows: bool = False,
        offer_model: Any = None,
        initial_state: Any = None,
        **options: Any,
    ):
        """`agent(count)` says the actions; `options` are those of GatewaysConfig.

        With `looks_at_rows` it is `agent(row)`.

        With `update_s` it takes a batch, and is busy for so long before the next one.
        """
        self._update_s = update_s
        self._agent = agent
        self._looks_at_rows = looks_at_rows
        self.bystander: Any = None  # see attacks.py
        self.think_s = 0.0  # for each answer of the agent
        self.unroll_length = unroll_length
        self.rollouts: list[Any] = []  # as (rows, outputs, state), of one column each, NumPy
        self.queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=batch_size if update_s else None,
        )
        self.batcher = libtorchbeast.DynamicBatcher(timeout_ms=10)
        state = (torch.zeros(1, 1),) if initial_state is None else initial_state
        self.pool = libtorchbeast.ActorPool(
            unroll_length, self.queue, self.batcher, initial_agent_state=state
        )
        self.gateways = Gateways(GatewaysConfig(**options), check_first=check_first)
        self.gateways.open()
        self.gateways.start(self.pool.add_lane, offer_model)
        self.over = threading.Event()
        self.thinks = threading.Event()  # while set, the agent does not answer
        if hold:
            self.thinks.set()
        self.errors: list[BaseException] = []
        targets = (self._infer, self._take, self._poll, self.pool.run)
        self.threads = [threading.Thread(target=self._call, args=(f,)) for f in targets]
        for thread in self.threads:
            thread.start()

    @property
    def address(self) -> str:
        return self.gateways.listening[0]

    def wait_for_rollouts(self, number: int, seconds: float = 60) -> None:
        wanted = len(self.rollouts) + number
        wait_until(lambda: len(self.rollouts) >= wanted or bool(self.errors), seconds)

    def wait_for_streams(self, number: int, seconds: float = 60) -> None:
        wait_until(lambda: self.gateways.num_streams == number or bool(self.errors), seconds)

    def wait_for_environments(self, number: int, seconds: float = 60) -> None:
        """Until rollouts of so many different ones are here."""

        ids: set[int] = set()
        num_seen = 0

        def are_there() -> bool:
            nonlocal num_seen
            new = self.rollouts[num_seen:]
            num_seen += len(new)
            ids.update(int(rows["frame"][0, 0, 0]) for rows, _, _ in new)
            return len(ids) >= number or bool(self.errors)

        wait_until(are_there, seconds)

    def close(self) -> None:
        if self.over.is_set():
            return
        self.over.set()
        self.queue.close()
        self.batcher.close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        self.gateways.close()
        if self.errors:
            raise self.errors[0]

    def _call(self, function: Any) -> None:
        try:
            function()
        except BaseException as error:
            self.errors.append(error)

    def _infer(self) -> None:
        for batch in self.batcher:
            row, state = batch.get_inputs()
            wait_until(lambda: not self.thinks.is_set())
            if self.think_s:
                time.sleep(self.think_s)
            batch.set_outputs(({"action": self._act(row)}, (state[0] + 1,)))

    def _act(self, row: Any) -> Any:
        if self._looks_at_rows:
            return self._agent(row)
        observation = nest.front(row["frame"])
        count = observation[..., 1] if observation.ndim > 2 else row["episode_step"]
        return self._agent(count.long())

    def _take(self) -> None:
        for (rows, outputs), state in self.queue:
            for i in range(rows["reward"].shape[1]):
                column = nest.map(lambda t, i=i: t[:, i : i + 1], (rows, outputs, state))
                self.rollouts.append(nest.map(lambda t: t.numpy().copy(), column))
            self.over.wait(self._update_s)

    def _poll(self) -> None:
        while not self.over.wait(0.02):
            self.gateways.poll()


@contextlib.contextmanager
def learner(**options: Any) -> Iterator[Learner]:
    learner = Learner(**options)
    try:
        yield learner
    finally:
        learner.close()


@contextlib.contextmanager
def client(address: str, num_envs: int = 1, make: Any = None, **options: Any) -> Iterator[Any]:
    """Environments that dial in, in a thread of this process."""
    make = make or (lambda: counting_group(num_envs))
    with running(EnvironmentClient([make], address, **options)) as client:
        yield client


@contextlib.contextmanager
def serving(
    address: str, build_s: float = 0.0, env_class: Any = Counting, **options: Any
) -> Iterator[Any]:
    """Environments that listen, two in a stream, in a thread of this process."""

    def make(knows_truncation: bool) -> Any:
        time.sleep(build_s)
        return counting_group(2, env_class)

    server, listens = EnvironmentServer(make, address, **options), threading.Event()
    with running(server, lambda _: listens.set()):
        assert listens.wait(60)
        yield server


@contextlib.contextmanager
def running(program: Any, *arguments: Any) -> Iterator[Any]:
    thread = threading.Thread(target=program.run, args=arguments)
    thread.start()
    try:
        yield program
    finally:
        program.stop()
        thread.join(60)
        assert not thread.is_alive()


def check_rollouts(rollouts: list[Any], unroll_length: int) -> dict[int, int]:
    """Every transition is there once, in order, and right; returns each environment's number.

    Only what was on its way when a stream broke may be missing.
    """
    last_rows: dict[int, Any] = {}
    num_transitions: dict[int, int] = defaultdict(int)
    for rows, outputs, _ in rollouts:
        frame, reward, done, truncated = (rows[k] for k in ("frame", "reward", "done", "truncated"))
        step, episode_return = rows["episode_step"], rows["episode_return"]
        last_action = rows["last_action"]
        assert len(reward) == unroll_length + 1
        ids = {int(frame[t, 0, 0]) for t in range(len(frame)) if not truncated[t, 0]}
        assert len(ids) == 1
        [id] = ids
        first = tuple(float(x) for x in frame[0, 0])
        is_new_stream = done[0, 0] and step[0, 0] == 0
        if id in last_rows and is_new_stream:
            assert first[1] >= last_rows[id][1], "what was lost with a stream does not come back"
        elif id in last_rows:
            assert first == last_rows[id], "a rollout begins with the last row of the one before"
        for t, u in itertools.pairwise(range(unroll_length + 1)):
            if truncated[u, 0]:
                assert done[u, 0]
                assert truncated[u:].all(), "only the end of a rollout is padded"
                break
            count = int(frame[u, 0, 1])
            assert count == int(frame[t, 0, 1]) + 1
            action = next_action(int(frame[t, 0, 1]))
            assert outputs["action"][u, 0] == action
            assert last_action[u, 0] == action
            assert frame[u, 0, 2] == (-1 if done[u, 0] else action)
            assert reward[u, 0] == count
            assert done[u, 0] == (step[u, 0] == EPISODE_STEPS)
            first_count = count - int(step[u, 0]) + 1
            assert episode_return[u, 0] == sum(range(first_count, count + 1))
            num_transitions[id] += 1
            last_rows[id] = tuple(float(x) for x in frame[u, 0])
    return num_transitions
