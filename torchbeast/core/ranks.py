"""Several learners of one run: their ranks, and what they compute and exchange together.

torchrun starts them and gives each a rank. `OneRank` stands for a learner without others;
`runtime/distributed.py` implements the same methods with PyTorch's process groups.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

Item = TypeVar("Item")


@dataclass(frozen=True)
class Place:
    """The rank of this process among the learners that torchrun has started; else alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its rank among the learners of this machine."""
    local_size: int = 1

    @classmethod
    def find(cls, variables: Mapping[str, str] = os.environ) -> "Place":
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "MASTER_ADDR" not in variables or any(name not in variables for name in names):
            return cls()
        return cls(*(int(variables[name]) for name in names))

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def share_of(self, items: Sequence[Item], on_this_machine: bool = False) -> list[Item]:
        """This learner's part of `items`, divided among all learners, or those of this machine."""
        if on_this_machine:
            return list(items[self.local_rank :: self.local_size])
        return list(items[self.rank :: self.size])


class LostLearner(RuntimeError):
    """Another learner has ended, or does not answer any more, so that training cannot go on."""


class Ranks(Protocol):
    """What learners do together. All ranks must call the collective methods in the same order;
    `look_up` and `write` are not collective."""

    rank: int
    size: int

    def wrap(self, loss: nn.Module, device: Any) -> nn.Module:
        """Wrap `loss` so that the backward pass sums its gradients over all ranks."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss that the wrapped module has returned."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks."""

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, [size, ...]."""

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, in their order; a message is what JSON can hold."""

    def share(self, contents: Any) -> Any:
        """The `contents` of rank 0: tensors, numbers and strings, as in a checkpoint."""

    def look_up(self, name: str) -> str | None:
        """The text that some rank has written under this name, or None; does not wait."""

    def write(self, name: str, text: str) -> None:
        """Write a text for `look_up`, unless a rank has written one under this name already."""


class OneRank:
    """The `Ranks` of a single learner."""

    rank = 0
    size = 1

    def wrap(self, loss: nn.Module, device: Any) -> nn.Module:
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [message]

    def share(self, contents: Any) -> Any:
        return contents

    def look_up(self, name: str) -> str | None:
        return None

    def write(self, name: str, text: str) -> None:
        pass


ALONE = OneRank()
