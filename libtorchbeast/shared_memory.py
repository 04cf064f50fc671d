"""Memory: shared without a name, and how much of it this machine has. Nothing here is compiled."""

import contextlib
import ctypes
import os
import sys
import threading
from pathlib import Path

CONTAINER_MEMORY = [  # where version 2 and version 1 of control groups say how much there is
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGE_BLOCK_BYTES = 1 << 20  # more than most messages have: asking the kernel each time is slow


def anonymous_memory(
    num_bytes: int, name: str, portable: bool = not hasattr(os, "memfd_create")
) -> int:
    """A file descriptor of shared memory that is gone when the last process lets go of it.

    It cannot be made smaller, which would end whoever reads it.
    """
    if portable:
        fd = _unlinked_memory()
        os.ftruncate(fd, num_bytes)
        return fd
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def can_shrink(fd: int, portable: bool = not hasattr(os, "memfd_create")) -> bool:
    """Whether whoever else has this memory can make it smaller; OSError if it is none."""
    if portable:
        return False  # nobody can tell
    import fcntl

    return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def _unlinked_memory() -> int:
    """For systems without memfd_create: a name that lives for an instant."""
    import _posixshmem

    for attempt in range(1000):
        name = f"/torchbeast-{os.getpid()}-{attempt}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            fd = _posixshmem.shm_open(name, flags, mode=0o600)
        except FileExistsError:
            continue
        _posixshmem.shm_unlink(name)
        return fd
    raise OSError(f"No free name for shared memory on {sys.platform}.")


def fence() -> None:
    """What this thread read and wrote before is done before what it reads and writes after.

    To give back a lock and then take one has this effect on every processor. x86 needs it for
    neither side, ARM for both.
    """
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def memory_bytes() -> int:
    """Of this machine, or of the container around us."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = [_number_in(path) for path in CONTAINER_MEMORY]
    return min([installed, *(number for number in allowed if number)])


def give_memory_back() -> None:
    """Let glibc return large blocks as soon as they are freed, from now on.

    Left alone it keeps up to 64 MiB for each thread once a block of 32 MiB was freed, which
    `malloc_trim` does not reach.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(parameter, LARGE_BLOCK_BYTES)


def raise_oom_score() -> None:
    """Let the kernel kill this process first when memory runs out: it is soon restarted."""
    with contextlib.suppress(OSError):  # other systems have no such file
        Path("/proc/self/oom_score_adj").write_text("1000")


def _number_in(path: Path) -> int:
    """0 if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
