"""The learner's weights in shared memory, for actors in other processes.

Written by one learner, read by any number of actors, without locks: a process that dies at any
instant blocks nobody. A reader never keeps a mixture of two versions, whatever the order in which
its processor sees the writer's stores: a checksum of the weights and their version stands beside
them, and a copy that does not fit its checksum is thrown away.
"""

import time
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchbeast.runtime.actor_model import tensors_of
from torchbeast.runtime.shared_tensors import ALIGNMENT, aligned, shared_zeros

RETRY_S = 0.0005  # the learner is in the middle of its copy


class SharedWeights:
    """A copy of a model's weights in shared memory, and the version (number of updates) of them."""

    def __init__(self, model: nn.Module) -> None:
        num_bytes = sum(aligned(tensor.nbytes) for tensor in tensors_of(model))
        self._shared = shared_zeros((ALIGNMENT + num_bytes,), torch.uint8)
        self._header[0] = -1

    @property
    def _memory(self) -> Tensor:
        return self._shared.tensors

    @property
    def _header(self) -> Tensor:
        """Version, checksum."""
        return self._memory[:16].view(torch.int64)

    def publish(self, model: nn.Module, version: int) -> None:
        """Make `model`'s weights the newest."""
        with torch.no_grad():
            for ours, theirs in _pairs(self._memory, model):
                ours.copy_(theirs)
        checksum = _checksum(self._memory, version)
        self._header[0], self._header[1] = version, checksum

    def fetch(self, model: nn.Module, have: int = -1, timeout_s: float = 60.0) -> int:
        """Copy the newest weights to `model` unless it has them; returns their version."""
        deadline = time.monotonic() + timeout_s
        while True:
            version = int(self._header[0])
            if version == have >= 0:
                return version
            if version >= 0:
                copy = self._memory.clone()
                version, checksum = copy[:16].view(torch.int64).tolist()
                if checksum == _checksum(copy, version):
                    with torch.no_grad():
                        for ours, theirs in _pairs(copy, model):
                            theirs.copy_(ours)
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


def _checksum(memory: Tensor, version: int) -> int:
    """Of the weights and their version. Never 0, which is what new memory holds."""
    start = zlib.crc32(version.to_bytes(8, "little", signed=True))
    return 1 + zlib.crc32(memory.numpy()[ALIGNMENT:].data, start)
