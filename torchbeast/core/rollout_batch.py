"""Batches of rollouts: how old they are, which episodes ended in them, and parts of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from libtorchbeast.tree import map_tree
from torchbeast.core.losses import Batch


class Rollouts(NamedTuple):
    """A batch, the agent's state at its first row, and how old each step is."""

    batch: Batch
    initial_state: tuple[Tensor, ...]
    lag: Tensor

    @property
    def mask(self) -> Tensor:
        """The transitions that are learnt from, [T, B]."""
        return ~self.batch["truncated"][1:]

    @property
    def num_steps(self) -> int:
        return int(self.mask.sum())

    def without(self, columns: list[int]) -> "Rollouts | None":
        """The rollouts without these columns; None if none is left."""
        kept = [i for i in range(self.lag.shape[1]) if i not in columns]
        return Rollouts(*pick_columns(tuple(self), kept)) if kept else None


def pick_columns(tree: Any, columns: Sequence[int] | Tensor) -> Any:
    """Select rollouts from a tree of tensors [T, B, ...] or [B]."""

    def pick(x: Tensor) -> Tensor:
        # Whole rows are copied: on a CPU that takes a tenth of the time of x[:, columns].
        index = torch.as_tensor(columns, device=x.device)
        return x.index_select(0 if x.dim() == 1 else 1, index)

    return map_tree(pick, tree)


def policy_lag(batch: Batch, version: int) -> Tensor:
    """By how many updates the weights that acted were behind, [T, B]; 0 in truncated rows."""
    truncated = batch["truncated"][1:]
    if "version" not in batch:
        return torch.zeros_like(truncated, dtype=torch.int64)
    return (version - batch["version"].expand(truncated.shape)).masked_fill(truncated, 0)


def drop_old_rollouts(batch: Batch, lag: Tensor, max_lag: int) -> int:
    """Mask rollouts with a step that is more than `max_lag` updates behind; returns how many.

    All their rows become `truncated`, so that nothing is learnt from them.
    """
    is_old = (lag > max_lag).any(dim=0)  # [B]
    batch["truncated"] = batch["truncated"] | is_old
    return int(is_old.sum())


def finished_episodes(batch: Batch) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that ended in this batch.

    Row 0 was the last row of the rollout before, and has been counted there.
    """
    done, episode_step = batch["done"][1:], batch["episode_step"][1:]
    over = done & (episode_step > 0)  # not the very first row, not a lost life
    return batch["episode_return"][1:][over].tolist(), episode_step[over].tolist()
