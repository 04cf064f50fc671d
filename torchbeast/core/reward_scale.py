"""Rewards divided by the running deviation of the discounted return, for the learner.

    R[t] = reward[t] + gamma * R[t-1], from 0 at the start of an episode

is followed through each environment's rollouts, one after the other. Its variance over all steps so
far says how large rewards are, given how far the agent looks ahead. Reported returns, and the
reward that the agent sees, are not scaled.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.running_moments import MAX_NORMALIZED, RunningMoments
from torchbeast.core.vtrace import suffix_scan

MAX_ENVIRONMENTS = 100_000  # whose R is kept; environments from elsewhere come and go


class RewardScale(nn.Module):
    """The moments of R, and R itself at the last row of each environment's newest rollout."""

    def __init__(self, discounting: float) -> None:
        super().__init__()
        self.moments = RunningMoments()
        self._discounting = discounting
        self._returns: dict[int, float] = {}  # by `source`

    def snapshot(self) -> dict[int, float]:
        return dict(self._returns)

    def restore(self, snapshot: dict[int, float]) -> None:
        self._returns = dict(snapshot)

    def scale(self, rewards: Tensor) -> Tensor:
        """Divide rewards by the deviation; the result is clipped to MAX_NORMALIZED."""
        deviation = self.moments.deviation.to(rewards.dtype)
        return (rewards / deviation).clamp(-MAX_NORMALIZED, MAX_NORMALIZED)

    @torch.no_grad()
    def observe(self, rewards: Tensor, batch: dict[str, Any], ranks: Ranks = ALONE) -> Tensor:
        """Update the statistics with a batch's rewards [T, B]; returns how many were clipped.

        Without a `source` in the batch it is not known which rollouts follow each other; each then
        begins at 0, and the deviation is too small if episodes are longer than rollouts.
        """
        # A transition that did not happen has no reward and takes no time.
        truncated, starts = batch["truncated"][1:], batch["done"][:-1]
        rewards = rewards.double().masked_fill(truncated, 0.0)
        reach = self.moments.reach  # clipped, or a huge reward would be in all later returns
        gains = rewards.clamp(-reach, reach)
        num_outliers = (gains != rewards).sum()
        decays = torch.full_like(gains, self._discounting).masked_fill(truncated, 1.0)
        decays.masked_fill_(starts, 0.0)
        returns = gains
        for sources, columns in _in_turn(batch):
            if sources:
                before = [self._returns.pop(source, 0.0) for source in sources]
                gains[0, columns] += decays[0, columns] * gains.new_tensor(before)
            # `suffix_scan` finds x[t] from x[t+1]; with time reversed, R[t] from R[t-1].
            reverse = suffix_scan(decays[:, columns].flip(0), gains[:, columns].flip(0))
            returns[:, columns] = reverse.flip(0)
            self._returns.update(zip(sources, returns[-1, columns].tolist(), strict=False))
        self.moments.add(returns[~truncated], ranks)
        while len(self._returns) > MAX_ENVIRONMENTS:
            self._returns.pop(next(iter(self._returns)))  # that of the oldest rollout
        return num_outliers

    def observe_nothing(self, ranks: Ranks) -> None:
        """Update the statistics with the rewards of other ranks, as this one has none."""
        self.moments.add(self.moments.mean.new_zeros(0), ranks)


def _in_turn(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Pairs of environments and their columns; a second rollout of one is in the next pair."""
    if "source" not in batch:
        return [([], list(range(batch["done"].shape[1])))]
    source = batch["source"]
    turns: list[dict[int, int]] = []
    for column, number in enumerate((source if source.dim() == 1 else source[0]).tolist()):
        free = next((turn for turn in turns if number not in turn), None)
        if free is None:
            turns.append(free := {})
        free[number] = column
    return [(list(turn), list(turn.values())) for turn in turns]
