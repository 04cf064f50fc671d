"""Batches of rollouts with numbers at random, as a learner gets them."""

from collections.abc import Callable
from typing import Any

import torch

MakeFrame = Callable[[int, torch.Generator], Any]
"""Frames for so many rows."""


def make_batch(
    generator: torch.Generator,
    T: int,
    B: int,
    A: int,
    make_frame: MakeFrame,
    reward_size: float = 3.0,
    **others: torch.Tensor,
) -> dict[str, Any]:
    """T+1 rows of B rollouts with A actions; a fifth of the rows are ends of episodes."""
    rows = T + 1, B
    return {
        "frame": make_frame(T + 1, generator),
        "reward": reward_size * torch.randn(rows, generator=generator),
        "done": torch.rand(rows, generator=generator) < 0.2,
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "episode_step": torch.randint(1, 50, rows, generator=generator),
        "episode_return": torch.randn(rows, generator=generator),
        "last_action": torch.randint(A, rows, generator=generator),
        "action": torch.randint(A, (T, B), generator=generator),
        "policy_logits": torch.randn(T, B, A, generator=generator),
        **others,
    }
