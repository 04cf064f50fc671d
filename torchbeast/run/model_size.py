"""How much memory learning with a model would take, found without allocating it.

With `--env remote` the first environments that dial in determine how large the model is. To measure
it, it is built on PyTorch's meta device, where tensors have shapes and no memory.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from libtorchbeast.shared_memory import memory_bytes
from torchbeast.core.optimizers import make_optimizer
from torchbeast.core.settings import Settings
from torchbeast.errors import UsageError

logger = logging.getLogger("torchbeast")

MEMORY_SHARE = 0.5  # of this machine's memory; the rest is for activations and all else
ACTIVATIONS = 100  # bytes that an update takes for each byte of its rows; the deep net takes 84


@dataclass(frozen=True)
class ModelSize:
    """Bytes that learning with a model takes, without activations and rollouts."""

    weights: int
    gradients: int
    optimizer: int

    def total(self, num_copies: int) -> int:
        """All of them, with `num_copies` more copies of the weights, for acting."""
        return (1 + num_copies) * self.weights + self.gradients + self.optimizer


def measure(model: nn.Module, settings: Settings) -> ModelSize:
    """The size of a model on the meta device, which cannot be used afterwards."""
    parameters = list(model.parameters())
    optimizer = make_optimizer(model, settings)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()  # creates the optimizer's state
    states = [value for state in optimizer.state.values() for value in state.values()]
    return ModelSize(
        weights=_num_bytes([*parameters, *model.buffers()]),
        gradients=_num_bytes(parameters),
        optimizer=_num_bytes(value for value in states if isinstance(value, torch.Tensor)),
    )


def check_fits(
    build: Callable[[], nn.Module], settings: Settings, num_copies: int, rollout_bytes: int
) -> None:
    """UsageError if learning with `build()` would take too much of this machine's memory.

    A model of the user's own may not work on the meta device; then it is built in memory.
    """
    budget = int(MEMORY_SHARE * _smallest_memory())
    _check(rollout_bytes, budget, "their rollouts")
    with torch.random.fork_rng():  # the run's initial weights stay the same
        try:
            with torch.device("meta"):
                model = build()
        except UsageError:
            raise
        except Exception as error:
            logger.warning(
                "The model cannot be built on the meta device (%s: %s); it is built in memory to "
                "see how large it is.", type(error).__name__, error,
            )  # fmt: skip
            model = build().to("meta")
    size = measure(model, settings)
    _check(
        size.total(num_copies) + rollout_bytes,
        budget,
        f"a model of {size.weights >> 20} MiB, its optimizer, {num_copies} copies and the rollouts",
    )


def most_rollouts(rollout_bytes: int) -> int:
    """Rollouts that an update has memory for, with any of the models."""
    budget = (1 - MEMORY_SHARE) * _smallest_memory()
    return max(1, int(budget / (ACTIVATIONS * rollout_bytes)))


def _check(num_bytes: int, budget: int, what: str) -> None:
    if num_bytes > budget:
        raise UsageError(
            f"{what} would take {num_bytes >> 20} MiB, of {budget >> 20} MiB that there are for "
            "them; use smaller observations, or another --model."
        )


def _smallest_memory() -> int:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return min([memory_bytes(), *(gpu.total_memory for gpu in gpus)])


def _num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
