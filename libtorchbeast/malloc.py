"""Settings of glibc's malloc: whether freed memory is kept or returned. Pure Python."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # from malloc.h
KEPT_BLOCK_BYTES = 1 << 30
KEPT_BYTES = (1 << 31) - 1
LARGE_BLOCK_BYTES = 1 << 20  # larger than most messages: a system call for each would be slow

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BLOCK_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
}
"""Environment variables with which a new process keeps its large freed blocks."""


def keep_freed_memory() -> bool:
    """Keep freed blocks from now on, for the large tensors that every step allocates again.

    Returns False where there is no glibc. Call it before threads are started: a thread that has a
    heap of its own keeps it.

    By default glibc returns each freed block of more than a few MB to the system. The page faults
    of using it again take a third of an update's time on CPU (docs/performance.md). Threads other
    than the first have heaps of 64 MiB, which are returned as a whole and have no room for larger
    blocks, so all threads get the same heap.
    """
    return _set({M_MMAP_THRESHOLD: KEPT_BLOCK_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1})


def give_memory_back() -> bool:
    """Return large blocks to the system as soon as they are freed; False without glibc.

    By default glibc keeps up to 64 MiB for each thread once a block of 32 MiB was freed, and
    `malloc_trim` does not return these.
    """
    return _set({M_TRIM_THRESHOLD: LARGE_BLOCK_BYTES, M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES})


def _set(parameters: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) for name, value in parameters.items())
