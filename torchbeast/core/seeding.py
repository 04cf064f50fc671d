"""Seeds for whatever draws random numbers in a process."""

import random

import numpy as np
import torch

SEED_LIMIT = 2**31  # what every generator and every environment takes


def seed_everything(seed: int) -> None:
    """All generators that an environment or a model may draw from: a fork inherits their state."""
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
    torch.manual_seed(seed)
