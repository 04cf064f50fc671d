"""Seeds: each environment has its own, and another one after each start of its process."""

import random

import numpy as np

SEED_LIMIT = 2**31  # seeds below it are valid for every generator and every environment


def derive_seed(seed: int, *path: int) -> int:
    """Derive a seed for the object at `path` (worker, start, group, ...) from `seed`.

    Neighbouring seeds lead to unrelated ones: environment 1 of seed 1 is not environment 0 of 2.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=path)
    return int(sequence.generate_state(1)[0]) % SEED_LIMIT


def seed_generators(seed: int) -> None:
    """Seed Python's and NumPy's global generators, which all environments of a process share."""
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
