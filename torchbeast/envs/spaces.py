"""What TorchBeast's agents take of an environment's spaces.

Actions are numbers from 0 to n - 1, observations trees of arrays with floats of 32 bits.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from libtorchbeast.rows import Environments as AnyEnvironments
from libtorchbeast.rows import is_discrete
from libtorchbeast.tree import map_tree
from torchbeast.errors import UsageError

FLOAT64 = np.dtype(np.float64)


class Environments(AnyEnvironments, Protocol):
    """A group whose actions are numbers from 0 to `num_actions` - 1."""

    num_actions: int


def count_actions(space: Any) -> int:
    """The number of actions in an environment's action space; UsageError if it is not Discrete."""
    if not is_discrete(space):
        raise UsageError(
            f"The environment's action_space must be Discrete, got {space}; "
            "wrap the environment so that its actions are numbers from 0 to n - 1."
        )
    return int(space.n)


def observer(space: Any) -> Callable[[Any], Any]:
    """The function that turns observations of this space into what agents see.

    It takes those of one environment, and those of a vector of environments.
    """
    if not is_discrete(space):
        return as_float32
    first = int(getattr(space, "start", 0))
    numbers = np.arange(first, first + int(space.n))

    def one_hot(observation: Any) -> np.ndarray:
        """One of n numbers as a vector with a 1 at that number."""
        return np.equal(np.asarray(observation)[..., None], numbers).astype(np.float32)

    return one_hot


def as_float32(observation: Any) -> Any:
    """A tree of arrays; of floats, 64 bits are more than a network can use."""
    if type(observation) is np.ndarray:  # for speed: the usual case
        return observation if observation.dtype is not FLOAT64 else observation.astype(np.float32)
    return map_tree(_leaf_as_float32, observation)


def _leaf_as_float32(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == FLOAT64 else array
