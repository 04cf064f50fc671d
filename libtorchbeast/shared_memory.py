"""Memory: shared without a name, and how much of it this machine has. Nothing here is compiled."""

import os
import sys
import threading
from pathlib import Path

CONTAINER_MEMORY = [  # where version 2 and version 1 of control groups say how much there is
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
]

ALIGNMENT = 64  # bytes: of a cache line, and of any dtype


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


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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


def _number_in(path: Path) -> int:
    """0 if there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0
