"""A model of your own whose memory is attention over the last rows of the episode.

    python -m torchbeast.polybeast --env Memory --model examples.transformer_memory:Agent

A model has two methods, `initial_state` and `forward`. What it must remember is its state: a tuple
of tensors [L, B, ...], here the features of the last WINDOW rows. It is part of each rollout, as an
LSTM's state is.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW = 8  # rows that attention sees, including the current one
SIZE = 64
HEADS = 4

State = tuple[Tensor, ...]


class Agent(nn.Module):
    """T is time, B batch: the learner calls it with whole rollouts, actors with T = 1."""

    def __init__(self, frame_shape: tuple[int, ...], num_actions: int, use_lstm: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(math.prod(frame_shape), SIZE), nn.Tanh())
        self.queries = nn.Linear(SIZE, SIZE)
        self.keys_and_values = nn.Linear(SIZE, 2 * SIZE)
        self.distance_bias = nn.Parameter(torch.zeros(HEADS, WINDOW))
        self.mix = nn.Sequential(nn.Linear(2 * SIZE, SIZE), nn.Tanh())
        self.policy = nn.Linear(SIZE, num_actions)
        self.baseline = nn.Linear(SIZE, 1)

    def initial_state(self, batch_size: int = 1) -> State:
        """Features of the rows before [WINDOW, B, SIZE], and which of them exist [WINDOW, B]."""
        return torch.zeros(WINDOW, batch_size, SIZE), torch.zeros(WINDOW, batch_size)

    def forward(self, inputs: dict[str, Tensor], state: State = ()) -> tuple[dict[str, Any], State]:
        features = self.encoder(inputs["frame"].flatten(2).float())  # [T, B, SIZE]
        remembered, state = self.remember(features, inputs["done"], state)
        core = self.mix(torch.cat([features, remembered], dim=-1))
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
        return output, state

    def remember(self, features: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        """Attention of each row to the last WINDOW rows of its episode, and the new state."""
        T, B, _ = features.shape
        before, exists = state
        rows = torch.cat([before, features])  # [W+T, B, SIZE]
        exists = torch.cat([exists, torch.ones(T, B, device=exists.device)])  # [W+T, B]
        # The number of each row's episode: the remembered rows have 0, as row 0 has if not `done`.
        episode = torch.cat([torch.zeros(WINDOW, B, device=done.device), done.cumsum(dim=0)])

        now = torch.arange(T, device=done.device)[:, None] + WINDOW
        then = torch.arange(WINDOW + T, device=done.device)[None, :]
        distance = now - then  # [T, W+T]
        in_window = (distance >= 0) & (distance < WINDOW)
        same_episode = episode[WINDOW:, None] == episode[None, :]  # [T, W+T, B]
        seen = in_window[:, :, None] & same_episode & (exists > 0)[None]
        bias = self.distance_bias[:, distance.clamp(0, WINDOW - 1)]  # [HEADS, T, W+T]
        bias = bias[None].expand(B, -1, -1, -1).masked_fill(~seen.permute(2, 0, 1)[:, None], -1e9)

        queries = _by_head(self.queries(features))
        keys, values = (_by_head(x) for x in self.keys_and_values(rows).chunk(2, dim=-1))
        found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        found = found.permute(2, 0, 1, 3).flatten(2)  # [B, HEADS, T, D] -> [T, B, SIZE]
        still_there = exists[-WINDOW:] * (episode[-WINDOW:] == episode[-1])
        return found, (rows[-WINDOW:], still_there)


def _by_head(x: Tensor) -> Tensor:
    """[N, B, SIZE] -> [B, HEADS, N, SIZE / HEADS]."""
    return x.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
