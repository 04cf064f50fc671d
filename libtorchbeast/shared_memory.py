"""Shared memory without a name, and how much memory this machine has. Pure Python."""

import os
import sys
import threading
from pathlib import Path

CONTAINER_MEMORY = [  # files with the limit of a control group (cgroup) of version 2, version 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]

ALIGNMENT = 64  # bytes: a cache line, and enough for any dtype


def anonymous_memory(
    num_bytes: int, name: str, portable: bool = not hasattr(os, "memfd_create")
) -> int:
    """A file descriptor of new shared memory, which is freed when no process uses it any more.

    Unless `portable`, it is sealed against shrinking, which would crash its readers.
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
    """Whether another process could shrink this memory; OSError if `fd` is not such memory."""
    if portable:
        return False  # there is no way to know
    import fcntl

    return not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK


def _unlinked_memory() -> int:
    """For systems without memfd_create: POSIX shared memory, whose name is unlinked at once."""
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


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def fence() -> None:
    """A memory fence: reads and writes before it are done before those after it.

    Releasing a lock and then acquiring one has this effect on every processor. To keep the order of
    one side's writes and of the other side's reads, ARM needs it on both sides, x86 on neither.
    """
    lock = threading.Lock()
    for _ in range(2):
        with lock:
            pass


def memory_bytes() -> int:
    """The memory of this machine in bytes, or of the container if its limit is lower."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = [_number_in(path) for path in CONTAINER_MEMORY]
    return min([installed, *(number for number in allowed if number)])


def _number_in(path: Path) -> int:
    """The number in a file; 0 if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
