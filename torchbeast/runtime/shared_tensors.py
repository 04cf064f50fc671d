"""Tensors that MonoBeast's processes share, in anonymous memory.

PyTorch's own shared tensors are files in /dev/shm, which is small in a container. These are passed
to a process by file descriptor, as multiprocessing's connections are, with any start method. They
are freed when the last process has closed them.
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
    """Shape and dtype of a shared tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SharedTensors:
    """A tree of tensors (`tensors`) in one piece of shared memory, all zeros at first.

    May be an argument of a multiprocessing process, which then sees the same memory.
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
        """The memory's file descriptor, which this object closes."""
        return self._fd

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # the memory stays mapped while there are tensors
            os.close(self._fd)

    def __reduce__(self) -> tuple[Callable[..., "SharedTensors"], tuple[Any, ...]]:
        return _rebuild, (self._specs, DupFd(self._fd))


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> SharedTensors:
    """One shared tensor of zeros."""
    return SharedTensors(TensorSpec(shape, dtype))


def _rebuild(specs: Any, handle: Any) -> SharedTensors:
    shared = SharedTensors.__new__(SharedTensors)
    shared._map(specs, handle.detach())
    return shared


def bytes_of(specs: Any) -> int:
    """Bytes of memory that a tree of `TensorSpec` takes."""
    return sum(aligned(spec.num_bytes) for _, spec in leaves_of(specs))
