"""A model of your own with a GRU as memory, which begins empty in each episode.

python -m torchbeast.monobeast --env Memory --model examples.gru_memory:Agent
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 64

State = tuple[Tensor, ...]


class Agent(nn.Module):
    """T is time, B batch: the learner calls it with whole rollouts, actors with T = 1."""

    def __init__(self, frame_shape: tuple[int, ...], num_actions: int, use_lstm: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(math.prod(frame_shape), SIZE), nn.Tanh())
        self.gru = nn.GRU(SIZE, SIZE)
        self.policy = nn.Linear(SIZE, num_actions)
        self.baseline = nn.Linear(SIZE, 1)

    def initial_state(self, batch_size: int = 1) -> State:
        """One tensor [1, B, SIZE]."""
        return (torch.zeros(1, batch_size, SIZE),)

    def forward(self, inputs: dict[str, Tensor], state: State = ()) -> tuple[dict[str, Any], State]:
        features = self.encoder(inputs["frame"].flatten(2).float())  # [T, B, SIZE]
        (hidden,) = state
        outputs = []
        for row, done in zip(features, inputs["done"], strict=True):
            hidden = hidden.masked_fill(done.bool().view(1, -1, 1), 0.0)  # a new episode begins
            output, hidden = self.gru(row.unsqueeze(0), hidden)
            outputs.append(output)
        core = torch.cat(outputs)
        logits = self.policy(core)  # [T, B, num_actions]
        if self.training:
            probabilities = F.softmax(logits.detach(), dim=-1).flatten(0, 1)
            action = torch.multinomial(probabilities, num_samples=1).view(logits.shape[:2])
        else:  # in tests, the most likely action
            action = logits.argmax(dim=-1)
        output = {
            "action": action,
            "policy_logits": logits,
            "baseline": self.baseline(core)[..., 0],
        }
        return output, (hidden,)
