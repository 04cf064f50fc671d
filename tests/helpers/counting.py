"""Environments that know all, and no torch, so that processes with them start soon."""

import random
import time
from typing import Any

import gymnasium
import numpy as np

from libtorchbeast.groups import Group
from libtorchbeast.sync_envs import SyncEnvs

NUM_ACTIONS = 5
EPISODE_STEPS = 7


def next_action(count):
    """What the agent of these tests does at the row with this count."""
    return (3 * count + 1) % NUM_ACTIONS


class Counting(gymnasium.Env):
    """Shows who it is, how many steps it took since it was made, and the last action it got."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
        self.id = random.SystemRandom().randrange(2**20)
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        self.time += 1
        done = self.time == EPISODE_STEPS
        return self._observe(int(action)), float(self.count), done, False, {}

    def _observe(self, action: int) -> Any:
        return np.array([self.id, self.count, action], np.float32)


class Shifted(Counting):
    """Its actions do not begin at 0; it shows them as if they did."""

    FIRST = 3

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS, start=self.FIRST)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return super().step(action - self.FIRST)


class Fragile(Counting):
    """Raises after a while."""

    def step(self, action: Any) -> Any:
        if self.count == 30:
            raise RuntimeError("the wheel came off")
        return super().step(action)


class Broken(Counting):
    """Never takes a second step; without a first it would not be taken."""

    def step(self, action: Any) -> Any:
        if self.count:
            raise RuntimeError("the wheel was never there")
        return super().step(action)


class Hanging(Counting):
    """Hangs after a while."""

    def step(self, action: Any) -> Any:
        if self.count == 10:
            time.sleep(1000)
        return super().step(action)


def observe(observation: Any) -> Any:
    return np.asarray(observation, np.float32)


def counting_group(num_envs: int, env_class: Any = Counting, rebuild: bool = True) -> Group:
    return Group(lambda _: SyncEnvs(env_class, num_envs, observe=observe), seed=0, rebuild=rebuild)
