"""Seeds for whatever draws random numbers in a process that uses PyTorch."""

import torch

from libtorchbeast.seeding import seed_generators


def seed_everything(seed: int) -> None:
    """All generators that an environment or a model may draw from: a fork inherits their state."""
    seed_generators(seed)
    torch.manual_seed(seed)
