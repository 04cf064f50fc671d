"""Tensors that processes share, in memory without a name.

PyTorch's own shared tensors are files in /dev/shm, which is small in a container. These are handed
to a process by file descriptor, as multiprocessing does with its connections, for all its start
methods, and are gone when the last process lets go of them.
"""

import math
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from libtorchbeast.shared_memory import ALIGNMENT, aligned, anonymous_memory
from libtorchbeast.tree import leaves_of, map_tree


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SharedTensors:
    """A tree of tensors, all zeros at first, in one piece of memory: `tensors`.

    May be an argument of a process of multiprocessing's, which then sees the same memory.
    """

    def __init__(self, specs: Any) -> None:
        """`specs` is a tree of `TensorSpec`."""
        self._map(specs, anonymous_memory(max(bytes_of(specs), ALIGNMENT), "torchbeast-tensors"))

    def _map(self, specs: Any, fd: int) -> None:
        self._specs = specs
        self._fd = fd
        self._memory = mmap.mmap(fd, 0)
        start = 0

        def view(spec: TensorSpec) -> Tensor:
            nonlocal start
            if spec.num_bytes == 0:
                return torch.zeros(spec.shape, dtype=spec.dtype)
            number = math.prod(spec.shape)
            flat = torch.frombuffer(self._memory, dtype=spec.dtype, count=number, offset=start)
            start += aligned(spec.num_bytes)
            return flat.view(spec.shape)

        self.tensors = map_tree(view, specs)

    @property
    def fd(self) -> int:
        """Stays ours."""
        return self._fd

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # the memory stays mapped while there are tensors
            os.close(self._fd)

    def __reduce__(self) -> tuple[Callable[..., "SharedTensors"], tuple[Any, ...]]:
        return _rebuild, (self._specs, DupFd(self._fd))


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> SharedTensors:
    """One tensor."""
    return SharedTensors(TensorSpec(shape, dtype))


def _rebuild(specs: Any, handle: Any) -> SharedTensors:
    shared = SharedTensors.__new__(SharedTensors)
    shared._map(specs, handle.detach())
    return shared


def bytes_of(specs: Any) -> int:
    """Of memory, for a tree of `TensorSpec`."""
    return sum(aligned(spec.num_bytes) for _, spec in leaves_of(specs))
