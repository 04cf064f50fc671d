"""Environments whose episodes are written down: each of some length, ended or cut off."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Scheduled(gymnasium.Env):
    """Episode n has the length `lengths[n]`, negative if a time limit ends it; then from the start.

    The observation is (the number of the episode, the time); the reward tells action and time.
    Actions are 3 and 4.
    """

    def __init__(self, lengths):
        self.observation_space = spaces.Box(0, 1000, (2,), np.float32)
        self.action_space = spaces.Discrete(2, start=3)
        self._lengths = lengths
        self._episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._episode += 1
        self._time = 0
        return self._observation(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self._time += 1
        length = self._lengths[self._episode % len(self._lengths)]
        over = self._time == abs(length)
        reward = 10.0 * self._time + action
        return self._observation(), reward, over and length > 0, over and length < 0, {}

    def _observation(self):
        return np.array([self._episode % len(self._lengths), self._time], np.float32)


def scheduled_vector(num_envs, mode, lengths):
    make = [lambda lengths=lengths[i]: Scheduled(lengths) for i in range(num_envs)]
    return gymnasium.vector.SyncVectorEnv(make, autoreset_mode=mode)
