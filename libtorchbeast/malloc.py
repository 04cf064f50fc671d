"""What glibc's malloc does with freed memory. Nothing here is compiled."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
KEPT_BLOCK_BYTES = 1 << 30
KEPT_BYTES = (1 << 31) - 1
LARGE_BLOCK_BYTES = 1 << 20  # more than most messages have: asking the kernel each time is slow

KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(KEPT_BLOCK_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
}
"""Variables for a process that is to be started: its large blocks need not go back each time."""


def keep_freed_memory() -> bool:
    """Hold on to freed blocks from now on: large tensors are freed and needed again at every step.
    False where there is no glibc.

    glibc gives each block of more than a few MB back to the system and asks for it again, and the
    page faults of touching it again are a third of an update's time on CPU (docs/performance.md).
    Threads other than the first have heaps of 64 MiB, which go back to the system as a whole, and
    nothing larger fits into one: hence one heap for all threads. Call it before they are started:
    those that have a heap of their own keep it.
    """
    return _set({M_MMAP_THRESHOLD: KEPT_BLOCK_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_ARENA_MAX: 1})


def give_memory_back() -> bool:
    """Return large blocks to the system as soon as they are freed, from now on. False as above.

    Left alone glibc keeps up to 64 MiB for each thread once a block of 32 MiB was freed, which
    `malloc_trim` does not reach.
    """
    return _set({M_TRIM_THRESHOLD: LARGE_BLOCK_BYTES, M_MMAP_THRESHOLD: LARGE_BLOCK_BYTES})


def _set(parameters: dict[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) for name, value in parameters.items())
