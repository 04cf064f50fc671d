"""The learner's weights in shared memory, for actors in other processes.

One learner writes and any number of actors read, without waiting for each other: a process that
dies at any instant blocks nobody. Beside the weights are the version that the learner last began to
write and the version that it last finished. A reader discards its copy unless both were the same
all the while, so that it never keeps a mixture of versions. Fences keep the order of these steps on
both sides, on any processor.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from libtorchbeast.shared_memory import ALIGNMENT, aligned, fence
from torchbeast.runtime.inference_model import tensors_of
from torchbeast.runtime.shared_tensors import shared_zeros

RETRY_S = 0.0005  # pause while the learner is writing


class SharedWeights:
    """A copy of a model's weights in shared memory, and their version (the number of updates)."""

    def __init__(self, model: nn.Module) -> None:
        num_bytes = sum(aligned(tensor.nbytes) for tensor in tensors_of(model))
        self._shared = shared_zeros((ALIGNMENT + num_bytes,), torch.uint8)
        self._begun[0] = self._finished[0] = -1

    @property
    def fd(self) -> int:
        """The memory's file descriptor, for gateways, which pass the weights on."""
        return self._shared.fd

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def offsets(self, model: nn.Module) -> list[int]:
        """The offset of each of `tensors_of(model)` in the memory, in bytes."""
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
    """Pairs of a view of the shared memory and the tensor of the model that belongs there.

    The shared memory is in row-major order, whatever memory format the model uses.
    """
    start = ALIGNMENT
    for tensor in tensors_of(model):
        place = memory[start : start + tensor.nbytes]
        yield place.view(tensor.dtype).view(tensor.shape), tensor
        start += aligned(tensor.nbytes)
