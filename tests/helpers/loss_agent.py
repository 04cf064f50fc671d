"""A model with a loss of its own, which any update makes smaller."""

import torch
from torch import nn

from torchbeast.models import Agent


class LossAgent(Agent):
    def __init__(self, frame_shape, num_actions, use_lstm):
        super().__init__(frame_shape, num_actions, use_lstm, encoder="mlp")
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, inputs, core_state=()):
        output, core_state = super().forward(inputs, core_state)
        error = (self.level - 1).expand(inputs["reward"].shape)
        return {**output, "losses": {"level_error": 0.5 * error**2}}, core_state
