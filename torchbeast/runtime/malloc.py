"""Keep freed memory in the process: large tensors are freed and needed again every step.

glibc gives each block of more than a few MB back to the system and asks for it again, and the page
faults of touching it again are a third of an update's time on CPU (docs/performance.md). Threads
other than the first have heaps of 64 MiB, which go back to the system as a whole, and nothing
larger fits into one: hence one heap for all threads.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ONE_GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to hold on to freed blocks. False where there is no glibc.

    Before threads are started: those that have a heap of their own keep it.
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
