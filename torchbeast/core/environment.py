"""One Gym environment with tensors [1, 1, ...] in and out, as code for TorchBeast expects."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbeast.core.tree import map_tree
from torchbeast.envs.sync import SyncEnvs

FIELDS = ("reward", "done", "episode_return", "episode_step", "last_action")


class Environment:
    """Adapts a Gym or Gymnasium environment. Episodes that end start anew by themselves."""

    def __init__(self, gym_env: Any) -> None:
        self.gym_env = gym_env
        self._envs = SyncEnvs(lambda: gym_env, num_envs=1)

    def initial(self) -> dict[str, Any]:
        """Reset, and the first row: dict of tensors [T=1, B=1, ...]."""
        return _as_tensors(self._envs.reset())

    def step(self, action: Tensor | int) -> dict[str, Any]:
        """Take `action` (a tensor of one element, or a number)."""
        return _as_tensors(self._envs.step(np.array([int(action)])))

    def close(self) -> None:
        self._envs.close()


def _as_tensors(row: dict[str, Any]) -> dict[str, Any]:
    # Copies: an environment may write its next frame into the same array.
    names = ("frame", "truncated", *FIELDS)
    return {
        name: map_tree(lambda array: torch.from_numpy(np.array(array)).unsqueeze(0), row[name])
        for name in names
    }
