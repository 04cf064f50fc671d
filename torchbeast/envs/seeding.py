"""Seeds for what environments may draw random numbers from."""

import random

import numpy as np

SEED_LIMIT = 2**31  # what every generator and every environment takes


def seed_generators(seed: int) -> None:
    """Python's generator and NumPy's, which all environments of a process share."""
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
