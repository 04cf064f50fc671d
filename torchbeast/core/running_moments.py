"""Running mean and standard deviation, for normalised observations and rewards."""

import torch
from torch import Tensor, nn

from torchbeast.core.ranks import ALONE, Ranks

EPSILON = 1e-8
MAX_NORMALIZED = 10.0  # normalised numbers are clipped: one that hardly varied so far may be huge
MAX_DEVIATIONS = 30.0  # samples further from the mean than that are clipped
MIN_COUNT = 100  # samples before which none is clipped


class RunningMoments(nn.Module):
    """Mean and variance of all samples so far, for each element of an array."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        # 64 bits, so that after many millions of samples one more still counts.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    @property
    def deviation(self) -> Tensor:
        return (self.variance + EPSILON).sqrt()

    @property
    def reach(self) -> Tensor:
        """How far from the mean samples may be without being clipped; at least MAX_DEVIATIONS.

        Otherwise a single 1e30 would make all other numbers 0 for ever. If such numbers keep
        coming, the deviation, and the reach with it, grows by a factor with each batch.
        """
        reach = MAX_DEVIATIONS * self.deviation.clamp(min=1.0)
        return torch.where(self.count >= MIN_COUNT, reach, torch.inf)

    @torch.no_grad()
    def add(self, samples: Tensor, ranks: Ranks = ALONE) -> Tensor:
        """Update the moments with the samples [N, ...] of all ranks, clipped to the reach.

        Returns how many numbers of this rank's samples were clipped.
        """
        numbers, reach = samples.double(), self.reach
        samples = numbers.clamp(self.mean - reach, self.mean + reach)
        self.add_bounded(samples, ranks)
        return (samples != numbers).sum()

    @torch.no_grad()
    def add_bounded(self, samples: Tensor, ranks: Ranks = ALONE) -> None:
        """The same without clipping, for bounded numbers such as those of images."""
        own = torch.zeros((3, *self.mean.shape), dtype=torch.float64, device=self.mean.device)
        if len(samples) > 0:
            own[0] = len(samples)
            mean = samples.mean(0)
            own[1] = mean
            own[2] = (samples - mean).square().mean(0)  # a fifth of the time of `var` over rows
        counts, means, variances = ranks.gather(own).unbind(1)  # [size, ...] each
        count = counts.sum(0)
        if not count.any():
            return
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
        weight = count / (self.count + count)
        difference = mean - self.mean
        self.variance.mul_(1 - weight).add_(weight * variance)
        self.variance.add_(weight * (1 - weight) * difference**2)
        self.mean.add_(weight * difference)
        self.count.add_(count.flatten()[0])
