"""TorchBeast's `Environment`: one Gym environment with tensors [1, 1, ...] in and out."""

from typing import Any

import torch
from torch import Tensor

from libtorchbeast.sync_envs import SyncEnvs
from libtorchbeast.tree import map_tree
from torchbeast.envs.spaces import observe


class Environment:
    """Adapts a Gym or Gymnasium environment, which is reset at the end of an episode."""

    def __init__(self, gym_env: Any) -> None:
        """Exceptions of `gym_env` reach the caller: only hosts rebuild environments."""
        self.gym_env = gym_env
        self._envs = SyncEnvs(lambda: gym_env, num_envs=1, observe=observe, rebuild=False)

    def initial(self) -> dict[str, Any]:
        """Reset the environment; returns the first row: a dict of tensors [T=1, B=1, ...]."""
        return _as_tensors(self._envs.reset())

    def step(self, action: Tensor | int) -> dict[str, Any]:
        """Take `action` (a tensor of one element, or a number); returns the next row."""
        return _as_tensors(self._envs.step([int(action)]))

    def close(self) -> None:
        self._envs.close()


def _as_tensors(row: dict[str, Any]) -> dict[str, Any]:
    # np.stack has copied the frame: an environment may write its next one into the same array.
    return map_tree(lambda array: torch.from_numpy(array).unsqueeze(0), row)
