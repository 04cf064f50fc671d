"""Lanes: shared memory in which a group of environments meets its actor.

    environments ── rows: frame, reward, done, ... for K environments ──► actor
                 ◄── actions for K environments ──────────────────────────

Whose turn it is stands in one word (`Turn`, cpp/turn.h); who has the turn owns the memory.

The memory has no name: a file descriptor stands for it, which child processes inherit. There is
nothing to unlink and nothing to clean up, however a process ends, and no limit of /dev/shm's size.
"""

import math
import mmap
import os
import resource
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

import nest
from libtorchbeast._C import Turn
from libtorchbeast.environments import Unstacked
from libtorchbeast.specs import ROW_FIELDS, ArraySpec, Spec

ALIGNMENT = 64
DESCRIPTORS_PER_LANE = 2  # and the memory, which Python maps through one of its own
HEADER = np.dtype([("turn", "<u4", 16), ("counts", "<u8", 8)])  # a cache line each

FREE, AGENT, ENVIRONMENT = Turn.State.FREE, Turn.State.AGENT, Turn.State.ENVIRONMENT
GONE, CLOSED = Turn.State.GONE, Turn.State.CLOSED


class LaneClosed(Exception):
    """The agent wants no more rows from this lane."""


class Lane:
    """Views of one lane's memory; the same for both sides and in each process that maps it."""

    def __init__(self, fd: int, spec: Spec, num_envs: int) -> None:
        """Map the memory behind `fd`, which then belongs to the lane."""
        self.fd = fd
        self.spec = spec
        self.num_envs = num_envs
        self.bell_fd: int | None = None  # what the actor rings when it passes the turn
        self._memory = np.frombuffer(mmap.mmap(fd, lane_size(spec, num_envs)), np.uint8)
        header = self._memory[: HEADER.itemsize].view(HEADER)[0]
        self.turn = Turn(header["turn"][:1])
        self._counts = header["counts"]  # of passes, of looks around
        self._had_turn = FREE  # what the state must be before our next rows
        self._next_byte = HEADER.itemsize
        self.rows: tuple[Any, ...] = nest.map(self._view, spec.row)  # [K, ...] each
        self.actions: Any = nest.map(self._view, spec.action)

    @classmethod
    def create(cls, spec: Spec, num_envs: int) -> "Lane":
        fd = anonymous_memory(lane_size(spec, num_envs))
        return cls(fd, spec, num_envs)

    def close(self) -> None:
        """Say that it is over, and let go of the descriptor; views stay valid until dropped."""
        self.turn.close()
        self.release()

    def release(self) -> None:
        """Let go of the descriptor and say nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def signs_of_life(self) -> int:
        """Grows while the environments' process does its work, or waits for the agent's."""
        return int(self._counts[:2].sum())

    @property
    def num_passes(self) -> int:
        """How often rows were written."""
        return int(self._counts[0])

    # What the environments' side does.

    def attach(self, timeout_s: float) -> None:
        """Wait until the lane is free. Then write the first rows, and `send_rows`."""
        state = self.turn.wait_while(GONE, timeout_s)
        if state == CLOSED:
            raise LaneClosed
        if state == GONE:
            raise TimeoutError(f"The lane's last rollout was not taken within {timeout_s} s.")
        if state != FREE:
            raise RuntimeError(f"The lane is in use: {state}.")
        self._had_turn = FREE

    def write(self, row: dict[str, Any]) -> None:
        """Copy a row into the lane."""
        for field, views in zip(ROW_FIELDS, self.rows, strict=True):
            nest.map_many2(_copy, views, row[field])

    def send_rows(self) -> None:
        """Give the agent its turn."""
        self._counts[0] += 1
        if not self.turn.pass_on(self._had_turn, AGENT):
            raise LaneClosed
        self._had_turn = ENVIRONMENT

    def look_around(self) -> None:
        """Say that this process lives, though it has nothing to write."""
        self._counts[1] += 1

    def wait_for_actions(self, timeout_s: float) -> bool:
        """Whether `actions` are there; raises `LaneClosed` at the end."""
        state = self.turn.wait_while(AGENT, timeout_s)
        if state in (GONE, CLOSED):
            raise LaneClosed
        return state == ENVIRONMENT

    def _view(self, spec: ArraySpec) -> np.ndarray:
        num_bytes = _num_bytes(spec, self.num_envs)
        flat = self._memory[self._next_byte : self._next_byte + num_bytes]
        self._next_byte += _aligned(num_bytes)
        return flat.view(spec.dtype).reshape(self.num_envs, *spec.shape)


def allow_descriptors(number: int) -> None:
    """Let this process open so many files, as far as the system allows: the default is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def close_free_lane(lanes: Iterable[Lane]) -> None:
    """One that nobody waits for or writes to, if there is one: another is to take its place."""
    free = next((lane for lane in lanes if lane.turn.state == FREE), None)
    if free is not None:
        free.turn.close()


def lane_size(spec: Spec, num_envs: int) -> int:
    """Bytes of a lane's memory."""
    leaves = [*nest.flatten(spec.row), *nest.flatten(spec.action)]
    return HEADER.itemsize + sum(_aligned(_num_bytes(leaf, num_envs)) for leaf in leaves)


def anonymous_memory(num_bytes: int, portable: bool = not hasattr(os, "memfd_create")) -> int:
    """A file descriptor of shared memory that is gone when the last process lets go of it."""
    fd = _unlinked_memory() if portable else os.memfd_create("torchbeast-lane")
    os.ftruncate(fd, num_bytes)
    return fd


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


def _copy(view: np.ndarray, value: Any) -> None:
    if np.shape(value) != view.shape:  # NumPy would repeat it where it can
        raise ValueError(f"A row must hold {view.dtype}{view.shape}, got shape {np.shape(value)}.")
    if isinstance(value, Unstacked):
        for i, array in enumerate(value.arrays):
            np.copyto(view[i : i + 1], array)
    else:
        np.copyto(view, value)


def _num_bytes(spec: ArraySpec, num_envs: int) -> int:
    return num_envs * math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
