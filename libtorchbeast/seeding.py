"""Seeds: every environment of every start has one of its own, whatever the run's seed."""

import random

import numpy as np

SEED_LIMIT = 2**31  # what every generator and every environment takes


def derive_seed(seed: int, *path: int) -> int:
    """A seed for whatever stands at `path` (worker, start, group, ...) below `seed`.

    Neighbouring seeds share nothing: environment 1 of seed 1 is not environment 0 of seed 2.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=path)
    return int(sequence.generate_state(1)[0]) % SEED_LIMIT


def seed_generators(seed: int) -> None:
    """Python's generator and NumPy's, which all environments of a process share."""
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
