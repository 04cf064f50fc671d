"""An environment, and agents, that take their time."""

import time

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from torchbeast.models import Agent

STEP_S = 0.2  # slow, and far from hanging


class Slow(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    step_s = STEP_S

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        time.sleep(self.step_s)
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Quick(Slow):
    step_s = 0.0


class Small(Agent):
    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, "mlp")


class SlowAgent(Small):
    """It answers slowly."""

    def forward(self, inputs, core_state=()):
        if not torch.is_grad_enabled():
            time.sleep(10 * STEP_S)
        return super().forward(inputs, core_state)


class SlowLearner(Small):
    """Its updates take long."""

    def forward(self, inputs, core_state=()):
        if len(inputs["reward"]) > 20:  # more than it is tried with
            time.sleep(12)
        return super().forward(inputs, core_state)
