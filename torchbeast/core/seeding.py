"""Seeds for whatever draws random numbers in a process."""

import torch

from torchbeast.envs.seeding import SEED_LIMIT, seed_generators

__all__ = ["SEED_LIMIT", "seed_everything"]


def seed_everything(seed: int) -> None:
    """All generators that an environment or a model may draw from: a fork inherits their state."""
    seed_generators(seed)
    torch.manual_seed(seed)
