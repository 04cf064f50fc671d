"""The learner's weights in shared memory, for actors in other processes.

Written by one learner, read by any number of actors, without waiting for each other: a process that
dies at any instant blocks nobody. Beside the weights stand the version that the learner last began
to write and the one that it last finished; a reader throws away what it copied unless both were the
same all the while. So it never keeps a mixture, whatever the order in which its processor sees the
writer's stores: fences keep the order of the four steps on either side.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from libtorchbeast.shared_memory import ALIGNMENT, aligned, fence
from torchbeast.runtime.actor_model import tensors_of
from torchbeast.runtime.shared_tensors import shared_zeros

RETRY_S = 0.0005  # the learner is in the middle of its copy


class SharedWeights:
    """A copy of a model's weights in shared memory, and the version (number of updates) of them."""

    def __init__(self, model: nn.Module) -> None:
        num_bytes = sum(aligned(tensor.nbytes) for tensor in tensors_of(model))
        self._shared = shared_zeros((ALIGNMENT + num_bytes,), torch.uint8)
        self._begun[0] = self._finished[0] = -1

    @property
    def fd(self) -> int:
        """Of the memory, for processes that are no actors of ours."""
        return self._shared.fd

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def offsets(self, model: nn.Module) -> list[int]:
        """Where each of `tensors_of(model)` lies, in bytes."""
        start = self._memory.data_ptr()
        return [place.data_ptr() - start for place, _ in _pairs(self._memory, model)]

    @property
    def _memory(self) -> Tensor:
        return self._shared.tensors

    @property
    def _begun(self) -> Tensor:
        return self._memory[:8].view(torch.int64)

    @property
    def _finished(self) -> Tensor:
        return self._memory[8:16].view(torch.int64)

    def publish(self, model: nn.Module, version: int) -> None:
        """Make `model`'s weights the newest."""
        self._begun[0] = version
        fence()
        with torch.no_grad():
            for ours, theirs in _pairs(self._memory, model):
                ours.copy_(theirs)
        fence()
        self._finished[0] = version

    def fetch(self, model: nn.Module, have: int = -1, timeout_s: float = 60.0) -> int:
        """Copy the newest weights to `model` unless it has them; returns their version."""
        deadline = time.monotonic() + timeout_s
        while True:
            version = int(self._finished[0])
            if version == have >= 0:
                return version
            if version >= 0:
                fence()
                with torch.no_grad():
                    for ours, theirs in _pairs(self._memory, model):
                        theirs.copy_(ours)
                fence()
                if int(self._begun[0]) == version:
                    return version
            if time.monotonic() >= deadline:
                raise TimeoutError(f"No whole version of the weights within {timeout_s:.0f} s.")
            time.sleep(RETRY_S)


def _pairs(memory: Tensor, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the model, after the place that it has in such memory.

    Plain row-major order in there, whatever memory format the model uses.
    """
    start = ALIGNMENT
    for tensor in tensors_of(model):
        place = memory[start : start + tensor.nbytes]
        yield place.view(tensor.dtype).view(tensor.shape), tensor
        start += aligned(tensor.nbytes)
