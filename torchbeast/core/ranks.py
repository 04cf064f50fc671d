"""Several learners of one run, as the algorithm sees them: who they are, and what they share.

torchrun starts them and gives each a rank. `OneRank` stands for a learner without others;
`runtime/distributed.py` has what PyTorch's process groups make of the same methods.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

Item = TypeVar("Item")


@dataclass(frozen=True)
class Place:
    """Of this process among the learners that torchrun has started; alone without it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among those of this machine."""
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
        """Every learner has another part; `on_this_machine`: of what only those here can reach."""
        if on_this_machine:
            return list(items[self.local_rank :: self.local_size])
        return list(items[self.rank :: self.size])


class LostLearner(RuntimeError):
    """Another learner has ended, or does not answer any more: nothing can be learnt together."""


class Ranks(Protocol):
    """What learners do together. All of them must call the same methods in the same order."""

    rank: int
    size: int

    def wrap(self, loss: nn.Module, device: Any) -> nn.Module:
        """`loss`, whose gradients are summed over all ranks in the backward pass."""

    def backward(self, loss: Tensor) -> None:
        """The backward pass of what the wrapped module has returned."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Those of all ranks, [size, ...]."""

    def exchange(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of all ranks, of what JSON can hold."""

    def share(self, contents: Any) -> Any:
        """What rank 0 gives here: tensors, numbers and strings, as in a checkpoint."""

    def look_up(self, name: str) -> str | None:
        """What some rank has written under this name; does not wait for the others."""

    def write(self, name: str, text: str) -> None:
        """For those who look it up, unless another rank has been faster."""


class OneRank:
    """A learner that has no others."""

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
