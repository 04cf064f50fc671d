"""Reverts an update that has failed, and averages buffers over ranks."""

import copy

import torch
from torch import Tensor, nn

from torchbeast.core.ranks import Ranks
from torchbeast.core.reward_scale import RewardScale
from torchbeast.core.rollout_batch import Rollouts
from torchbeast.core.running_moments import RunningMoments
from torchbeast.core.settings import Settings


class Undo:
    """Saves the state of model, statistics and optimizer; each call restores it.

    Forward passes change running means, and of several steps of the optimizer the first may have
    been made when a later one fails.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: RewardScale | None,
        optimizer: torch.optim.Optimizer,
        flags: Settings,
    ) -> None:
        self._model, self._scale, self._optimizer = model, scale, optimizer
        modules = [model] if scale is None else [model, scale]
        tensors = [b for module in modules for b in module.buffers()]
        self._optimizer_state = None
        if flags.num_passes * flags.num_minibatches > 1:
            tensors += list(model.parameters())
            self._optimizer_state = copy.deepcopy(optimizer.state_dict())
        self._saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._returns = scale.snapshot() if scale is not None else {}

    @torch.no_grad()
    def __call__(self) -> None:
        for tensor, value in self._saved:
            tensor.copy_(value)
        if self._optimizer_state is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
        if self._scale is not None:
            self._scale.restore(self._returns)

    def changed_buffers(self, ranks: Ranks) -> list[Tensor]:
        """The model's buffers that forward passes have changed, differently on each rank.

        Such as batch normalisation's; our own statistics are the same on all ranks already.
        """
        if ranks.size == 1:
            return []
        ours = [m for m in self._model.modules() if isinstance(m, RunningMoments)]
        same = {id(buffer) for moments in ours for buffer in moments.buffers()}
        of_model = {id(buffer) for buffer in self._model.buffers()} - same
        saved = [pair for pair in self._saved if id(pair[0]) in of_model]
        if not saved:
            return []
        changed = ranks.sum(torch.tensor([int(not torch.equal(*pair)) for pair in saved])).tolist()
        return [buffer for (buffer, _), by in zip(saved, changed, strict=True) if by]


@torch.no_grad()
def even_out(buffers: list[Tensor], mine: Rollouts | None, ranks: Ranks) -> None:
    """Set buffers to their mean over ranks, weighted by the steps that each has learnt from."""
    if not buffers:
        return
    weight = torch.tensor(0 if mine is None else mine.num_steps, dtype=torch.float64)
    total = ranks.sum(weight)
    for buffer in buffers:
        mean = ranks.sum(buffer.double() * (weight / total).to(buffer.device))
        buffer.copy_(mean if buffer.is_floating_point() else mean.round())
