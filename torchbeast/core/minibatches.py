"""The parts of a batch that the optimizer makes its steps with, dealt out over all learners."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchbeast.core.ranks import Ranks
from torchbeast.core.settings import Settings


class Part(NamedTuple):
    """Of one rank's batch, for one step of the optimizer."""

    columns: Tensor | None
    """None: all."""
    num_steps: int
    """In these columns, without those that are not learnt from; 0: others have all of this part."""


def deal_out(mask: Tensor | None, flags: Settings, ranks: Ranks) -> list[Part]:
    """The parts of all passes that some rank has something in; as many on every rank.

    `mask` [T, B] says what is learnt from here; None: nothing. The parts are those that all
    ranks' columns side by side would be dealt out to.
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
    """At random, one after the other, beginning where the rank before has left off."""
    if num_parts <= 1:
        yield from [None] * num_parts
        return
    order = torch.randperm(num_columns).to(device)
    yield from (order[(i - first) % num_parts :: num_parts] for i in range(num_parts))
