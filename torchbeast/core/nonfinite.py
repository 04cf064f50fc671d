"""Finds the rollouts that make a batch's gradient infinite or NaN, and says who sent them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from libtorchbeast.tree import leaves_of
from torchbeast.core.rollout_batch import pick_columns

MAX_NAMED = 4  # rollouts in one message

Loss = Callable[[Any, Any], Tensor]
"""From a batch [T+1, B, ...] and the agent's state at its first row to the loss."""


def find_nonfinite(model: nn.Module, loss_of: Loss, batch: Any, initial_state: Any) -> list[int]:
    """The columns (rollouts) that by themselves have a gradient whose norm is not finite."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    nonfinite = []
    for i in range(batch["reward"].shape[1]):
        loss = loss_of(pick_columns(batch, [i]), pick_columns(initial_state, [i]))
        # Not `backward`, which would trigger the hooks of DistributedDataParallel.
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norm = nn.utils.get_total_norm([g for g in gradients if g is not None])
        if not norm.isfinite():
            nonfinite.append(i)
    return nonfinite


def describe_rollouts(
    batch: Any, columns: Sequence[int], version: int, name_source: Callable[[int], str]
) -> str:
    """Text for a message: who sent these rollouts, their ranges, and the weights that acted."""
    texts = [_describe(pick_columns(batch, [i]), i, name_source) for i in columns[:MAX_NAMED]]
    if len(columns) > MAX_NAMED:
        texts.append(f"{len(columns) - MAX_NAMED} more")
    return f"{'; '.join(texts)}; the newest weights have version {version}"


def _describe(rollout: Any, column: int, name_source: Callable[[int], str]) -> str:
    who = f"rollout {column} of the batch"
    if "source" in rollout:
        who = f"{name_source(int(rollout['source'].flatten()[0]))} ({who})"
    fields = {name: rollout[name] for name in ("reward", "policy_logits")}
    ranges = [
        f"{name} from {x.min().item():g} to {x.max().item():g}"
        for name, x in leaves_of({"frame": rollout["frame"], **fields})
    ]
    if "version" in rollout:
        ranges.append(f"version {int(rollout['version'].max())}")
    return f"{who}: {', '.join(ranges)}"
