"""Keep freed memory in the process: large tensors are freed and needed again every step.

glibc gives each block of more than a few MB back to the system and asks for it again, and the page
faults of touching it again are a third of an update's time on CPU (docs/performance.md).
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_ONE_GIB = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to hold on to freed blocks. False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _ONE_GIB) and mallopt(_M_TRIM_THRESHOLD, 2 * _ONE_GIB - 1)
    )
