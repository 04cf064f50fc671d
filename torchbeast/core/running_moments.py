"""Mean and deviation of all numbers so far, of observations or of returns."""

import torch
from torch import Tensor, nn

EPSILON = 1e-8
MAX_NORMALIZED = 10.0  # what hardly varied so far may be anything later


class RunningMoments(nn.Module):
    """Mean and variance of all samples so far, for each element of an array."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        # Of 64 bits: after many millions of samples one more must still count.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    @property
    def deviation(self) -> Tensor:
        return (self.variance + EPSILON).sqrt()

    @torch.no_grad()
    def add(self, samples: Tensor) -> None:
        """Take in samples [N, ...]: of two sets, the means and variances give those of both."""
        if len(samples) == 0:
            return
        samples = samples.double()
        weight = len(samples) / (self.count + len(samples))
        difference = samples.mean(0) - self.mean
        self.variance.mul_(1 - weight).add_(weight * samples.var(0, correction=0))
        self.variance.add_(weight * (1 - weight) * difference**2)
        self.mean.add_(weight * difference)
        self.count.add_(len(samples))
