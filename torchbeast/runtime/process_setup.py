"""How a process that runs PyTorch is set up: its seeds, its device, its memory."""

import ctypes
import sys

import torch

from libtorchbeast.seeding import seed_generators
from torchbeast.core.ranks import Place
from torchbeast.errors import UsageError

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ONE_GIB = 1 << 30


def seed_everything(seed: int) -> None:
    """All generators that an environment or a model may draw from: a fork inherits their state."""
    seed_generators(seed)
    torch.manual_seed(seed)


def own_device(use_cuda: bool) -> torch.device:
    """A GPU if there is one; of several learners on a machine, each has one of its own."""
    if not use_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    place = Place.find()
    if place.is_alone:
        return torch.device("cuda")
    if place.local_size > torch.cuda.device_count():
        raise UsageError(
            f"{place.local_size} learners on this machine need a GPU each, and there are "
            f"{torch.cuda.device_count()}; lower --nproc_per_node, or give --disable_cuda."
        )
    return torch.device("cuda", place.local_rank)


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to hold on to freed blocks: large tensors are freed and needed again at
    every step. False where there is no glibc.

    glibc gives each block of more than a few MB back to the system and asks for it again, and the
    page faults of touching it again are a third of an update's time on CPU (docs/performance.md).
    Threads other than the first have heaps of 64 MiB, which go back to the system as a whole, and
    nothing larger fits into one: hence one heap for all threads. Call it before they are started:
    those that have a heap of their own keep it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_MMAP_THRESHOLD: _ONE_GIB,
        _M_TRIM_THRESHOLD: 2 * _ONE_GIB - 1,
        _M_ARENA_MAX: 1,
    }
    return all(mallopt(name, value) for name, value in settings.items())
