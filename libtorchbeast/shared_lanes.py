"""Lanes: shared memory through which a group of environments and its actor exchange data.

    environments ── rows: frame, reward, done, ... for K environments ──► actor
                 ◄── actions for K environments ──────────────────────────

One word says whose turn it is (`Turn`, cpp/turn.h); the side that has the turn owns the memory.

The memory has no name, only a file descriptor, which child processes inherit and other processes
receive over a unix socket. So there is nothing to clean up, however a process ends, and the size
of /dev/shm is no limit.
"""

import math
import mmap
import os
import resource
from collections.abc import Iterable
from typing import Any

import numpy as np

import nest
from libtorchbeast import episode_info
from libtorchbeast._C import Turn
from libtorchbeast.episode_info import InfoSums
from libtorchbeast.rollout_layout import RolloutSpec
from libtorchbeast.rows import NUMBERS, Row, Spec, Unstacked
from libtorchbeast.shared_memory import aligned, anonymous_memory, can_shrink
from libtorchbeast.specs import ArraySpec, count_actions
from libtorchbeast.text import printable

DESCRIPTORS_PER_LANE = 2  # `Lane.fd`, and the copy of it that Python's mmap keeps
MAX_LANE_NAME_BYTES = 128
# A number in `info`: name (empty: unused entry), sum, and number of episodes, since the start.
INFO = np.dtype(
    [("name", f"S{episode_info.MAX_INFO_NAME_BYTES}"), ("total", "<f8"), ("count", "<u8")]
)
# The first two fields have a cache line each.
HEADER = np.dtype(
    [
        ("turn", "<u4", 16),
        ("counts", "<u8", 8),
        ("name", f"S{MAX_LANE_NAME_BYTES}"),
        ("infos", INFO, episode_info.MAX_NAMES),
    ]
)

FREE, AGENT, ENVIRONMENT = Turn.State.FREE, Turn.State.AGENT, Turn.State.ENVIRONMENT
GONE, CLOSED = Turn.State.GONE, Turn.State.CLOSED


class LaneClosed(Exception):
    """The lane is closed: the agent takes no more rows from it."""


class Lane:
    """Views of one lane's memory, used by both sides, in each process that maps it."""

    def __init__(self, fd: int, spec: Spec | RolloutSpec, num_envs: int) -> None:
        """Map the memory behind `fd`, which then belongs to the lane.

        With a `RolloutSpec`, `rows` are whole rollouts [K, T+1, ...], and there are no actions.
        """
        self.fd = fd
        self.spec = spec
        self.num_envs = num_envs
        self.wakeup_fd: int | None = None  # written to when the actor passes the turn
        self.marks_rows = True  # as taken (cpp/turn.h), which hosts of older versions do not know
        self.client = ""  # the client whose environments these are; empty: the learner's own
        self._memory = np.frombuffer(mmap.mmap(fd, lane_size(spec, num_envs)), np.uint8)
        header = self._memory[: HEADER.itemsize].view(HEADER)[0]
        self.turn = Turn(header["turn"][:1])
        self._counts = memoryview(header["counts"])  # faster than an array for single numbers
        self._header = header
        self._infos = header["infos"]
        self._info_counts = self._infos["count"]
        self._seen_counts = np.zeros_like(self._info_counts)
        self._seen_infos: dict[int, tuple[str, tuple[float, int]]] = {}  # by index in `_infos`
        self._info_sums: InfoSums = {}
        self._had_turn = FREE  # the state that the turn must have when we send our next rows
        self._next_byte = HEADER.itemsize
        self.rows: Row = nest.map(self._view, spec.row)  # [K, ...] each
        self.actions: Any = nest.map(self._view, spec.action)
        # Views for single numbers: a few are written and read faster one by one than by NumPy.
        numbers = {k: memoryview(v) for k, v in self.rows.items() if k in NUMBERS}
        self._action_cells: memoryview | None = None
        if count_actions(spec.action) > 0 and spec.action.dtype == "int64":
            self._action_cells = memoryview(self.actions)
            numbers["last_action"] = memoryview(self.rows["last_action"])
        self._fields = [(k, v, numbers.get(k)) for k, v in self.rows.items()]
        self._frame_bytes: list[memoryview] = []  # one an environment, if a frame is one array
        if type(frame := self.rows.get("frame")) is np.ndarray and frame.nbytes > 0:
            flat = frame.reshape(num_envs, -1).view(np.uint8)
            self._frame_bytes = [x.data for x in flat]

    @classmethod
    def create(cls, spec: Spec | RolloutSpec, num_envs: int) -> "Lane":
        fd = anonymous_memory(lane_size(spec, num_envs), "torchbeast-lane")
        try:
            return cls(fd, spec, num_envs)
        except BaseException:  # for example, no descriptor is left for the mapping
            os.close(fd)
            raise

    @property
    def has_rollouts(self) -> bool:
        return isinstance(self.spec, RolloutSpec)

    def fits(self, num_envs: int, client: str, has_rollouts: bool) -> bool:
        """Whether the lane can be used for such a group of this client."""
        ours = (self.num_envs, self.client, self.has_rollouts)
        return ours == (num_envs, client, has_rollouts)

    def close(self) -> None:
        """Close the lane for both sides, and its descriptor; views stay valid until dropped."""
        self.turn.close()
        self.release()

    def release(self) -> None:
        """Close the descriptor, but not the lane."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def num_passes(self) -> int:
        """How often rows were sent."""
        return self._counts[0]

    @property
    def name(self) -> str:
        """The name of the process that steps the environments, for logs: one printable line."""
        text = bytes(self._header["name"]).decode(errors="replace")
        return printable(text)

    @name.setter
    def name(self, name: str) -> None:
        self._header["name"] = name.encode()[:MAX_LANE_NAME_BYTES]

    def read_info(self) -> InfoSums:
        """The sums of all that `add_info` has added so far; the same dict if nothing was added.

        The writer may be writing at this moment, and may be any program: invalid entries are
        left out.
        """
        counts = self._info_counts.copy()
        changed = np.flatnonzero(counts != self._seen_counts).tolist()
        if not changed:
            return self._info_sums
        self._seen_counts = counts
        for i in changed:
            name = bytes(self._infos["name"][i]).decode(errors="replace")
            total = float(self._infos["total"][i])
            self._seen_infos.pop(i, None)
            if episode_info.is_name(name) and math.isfinite(total):
                self._seen_infos[i] = (name, (total, int(counts[i])))
        self._info_sums = dict(self._seen_infos.values())
        return self._info_sums

    # The following methods are for the environments' side.

    def attach(self, timeout_s: float) -> None:
        """Wait until the lane is free; the caller may then write its first rows and send them.

        Raises TimeoutError, `LaneClosed`, or RuntimeError if other environments use the lane.
        """
        state = self.turn.wait_while(GONE, timeout_s)
        if state == CLOSED:
            raise LaneClosed
        if state == GONE:
            raise TimeoutError(f"The lane's last rollout was not taken within {timeout_s} s.")
        if state != FREE:
            raise RuntimeError(f"The lane is in use: {state}.")
        self._had_turn = FREE

    def write(self, row: Row) -> None:
        """Copy a row into the lane."""
        for name, views, cells in self._fields:
            value = row[name]
            if cells is not None and type(value) is list:
                if len(value) != len(cells):
                    raise ValueError(f"A row must hold {len(cells)} numbers, got {len(value)}.")
                for i, number in enumerate(value):
                    cells[i] = number
            elif type(value) is Unstacked and self._write_bytes(value):
                pass
            elif type(views) is np.ndarray:
                _copy(views, value)
            else:
                nest.map_many2(_copy, views, value)

    def _write_bytes(self, frames: Unstacked) -> bool:
        """Copy frames as bytes, without NumPy; False if their layout is not that of the lane."""
        view = self.rows["frame"]
        if not self._frame_bytes or frames.dtype is not view.dtype or frames.shape != view.shape:
            return False
        for cells, array in zip(self._frame_bytes, frames.arrays, strict=True):
            if array.dtype is not view.dtype or not array.data.c_contiguous:
                return False
            cells[:] = array.data.cast("B")
        return True

    def read_actions(self, as_list: bool) -> Any:
        """A copy of the actions; a list if `as_list` and each action is one integer."""
        if as_list and self._action_cells is not None:
            return self._action_cells.tolist()
        return nest.map(np.copy, self.actions)

    def add_info(self, info: InfoSums) -> None:
        """Add to the sums in the header, which the agent's side reads periodically."""
        for name, (total, count) in info.items():
            for entry in self._infos:
                if entry["name"] in (b"", name.encode()):
                    entry["name"] = name.encode()
                    entry["total"] += total
                    entry["count"] += count
                    break

    def send_rows(self, timeout_s: float = 0.0) -> bool:
        """Pass the turn to the agent, then wait as `wait_for_actions` does.

        A caller with nothing else to do waits here, not in a second call: other processes run
        between the calls, and take our code out of the caches.
        """
        self._counts[0] += 1
        state = self.turn.exchange(self._had_turn, timeout_s)
        self._had_turn = ENVIRONMENT
        return _has_turn(state)

    def wait_for_actions(self, timeout_s: float) -> bool:
        """Wait for actions; return whether they have come. Raises `LaneClosed`."""
        return _has_turn(self.turn.wait_for_actions(timeout_s))

    def _view(self, spec: ArraySpec) -> np.ndarray:
        num_bytes = self.num_envs * spec.num_bytes
        flat = self._memory[self._next_byte : self._next_byte + num_bytes]
        self._next_byte += aligned(num_bytes)
        return flat.view(spec.dtype).reshape(self.num_envs, *spec.shape)


def map_lane(fd: int | None, spec: Spec | RolloutSpec, num_envs: int) -> Lane | None:
    """Map the lane behind a descriptor that another process sent; the lane then owns it.

    None if the descriptor was lost on the way, if it cannot be mapped, or if its memory has
    another size, or can be shrunk: then the sender could crash this process.
    """
    if fd is None:
        return None
    try:
        size = lane_size(spec, num_envs)
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # some systems round up to whole pages
        if not can_shrink(fd) and os.fstat(fd).st_size in (size, pages):
            return Lane(fd, spec, num_envs)
    except OSError:
        pass
    os.close(fd)
    return None


def allow_descriptors(number: int) -> None:
    """Let this process open so many more files than the usual 1024, if the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def close_free_lane(lanes: Iterable[Lane]) -> None:
    """Close a lane that has no environments, if there is one, to make room for another lane."""
    free = next((lane for lane in lanes if lane.turn.state == FREE), None)
    if free is not None:
        free.turn.close()


def lane_size(spec: Spec | RolloutSpec, num_envs: int) -> int:
    """Bytes of a lane's memory."""
    leaves = [*nest.flatten(spec.row), *nest.flatten(spec.action)]
    return HEADER.itemsize + sum(aligned(num_envs * leaf.num_bytes) for leaf in leaves)


def _has_turn(state: Turn.State) -> bool:
    """Whether it is the environments' turn; `LaneClosed` if it will never be again."""
    if state is ENVIRONMENT:
        return True
    if state is not AGENT:
        raise LaneClosed
    return False


def _copy(view: np.ndarray, value: Any) -> None:
    if value.shape != view.shape:  # NumPy would broadcast it where it can
        raise ValueError(f"A row must hold {view.dtype}{view.shape}, got shape {value.shape}.")
    if value.dtype != view.dtype and not np.can_cast(value.dtype, view.dtype, "same_kind"):
        raise TypeError(f"A row must hold {view.dtype}, got {value.dtype}.")
    if isinstance(value, Unstacked):
        for i, array in enumerate(value.arrays):
            view[i] = array
    else:
        view[...] = value
