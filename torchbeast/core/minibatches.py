"""Splits batches into minibatches, one for each step of the optimizer, alike on all learners."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchbeast.core.ranks import Ranks
from torchbeast.core.settings import Settings


class Part(NamedTuple):
    """The part of one rank's batch that is in a minibatch."""

    columns: Tensor | None
    """Indices of the batch's columns (rollouts, or mixed steps); None: all."""
    num_steps: int
    """Steps in these columns that are learnt from; 0: only other ranks have some."""


def deal_out(mask: Tensor | None, flags: Settings, ranks: Ranks) -> list[Part]:
    """The minibatches of all passes in which some rank has steps; as many on every rank.

    `mask` [T, B] says which steps are learnt from; None: this rank has no batch. Minibatches are
    those of one large batch, which has the columns of all ranks side by side.
    """
    num_columns = 0 if mask is None else mask.shape[1]
    columns_of = ranks.gather(torch.tensor(num_columns)).tolist()
    num_parts = min(flags.num_minibatches, sum(columns_of))
    first = sum(columns_of[: ranks.rank])
    device = None if mask is None else mask.device
    dealt = [
        columns
        for _ in range(flags.num_passes)
        for columns in _deal(num_columns, first, num_parts, device)
    ]
    if mask is None:
        counts = torch.zeros(len(dealt), dtype=torch.int64)
    else:
        sums = [(mask if c is None else mask[:, c]).sum() for c in dealt]
        counts = torch.stack(sums).cpu() if sums else torch.zeros(0, dtype=torch.int64)
    totals = ranks.sum(counts).tolist()
    return [
        Part(columns, number)
        for columns, number, total in zip(dealt, counts.tolist(), totals, strict=True)
        if total > 0
    ]


def _deal(
    num_columns: int, first: int, num_parts: int, device: torch.device | None
) -> Iterator[Tensor | None]:
    """Deal shuffled columns out to the parts in turn, from where the rank before has stopped."""
    if num_parts <= 1:
        yield from [None] * num_parts
        return
    order = torch.randperm(num_columns).to(device)
    yield from (order[(i - first) % num_parts :: num_parts] for i in range(num_parts))
