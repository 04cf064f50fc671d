"""Environments in which long and short episodes, or drawn and likely actions, do not pay alike."""

import gymnasium
import numpy as np


class Uneven(gymnasium.Env):
    """Half of the episodes take one step and pay 1, the others take 50 and pay nothing."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = self.np_random.choice([1, 50])
        self.reward = float(self.steps_left == 1)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps_left -= 1
        return np.zeros(2, np.float32), self.reward, self.steps_left == 0, False, {}


class PaysItsAction(Uneven):
    """Episodes of one step, whose return is the action."""

    def reset(self, *, seed=None, options=None):
        self.steps_left = 1
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), float(action), True, False, {}
