"""Lanes: shared memory in which a group of environments meets its actor.

    environments ── rows: frame, reward, done, ... for K environments ──► actor
                 ◄── actions for K environments ──────────────────────────

Whose turn it is stands in one word (`Turn`, cpp/turn.h); who has the turn owns the memory.

The memory has no name: a file descriptor stands for it, which child processes inherit and others
are sent over a unix socket. There is nothing to unlink and nothing to clean up, however a process
ends, and no limit of /dev/shm's size.
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
from libtorchbeast.rollouts import RolloutSpec
from libtorchbeast.rows import NUMBERS, Row, Spec, Unstacked
from libtorchbeast.shared_memory import aligned, anonymous_memory, can_shrink
from libtorchbeast.specs import ArraySpec, count_actions
from libtorchbeast.text import printable

DESCRIPTORS_PER_LANE = 2  # and the memory, which Python maps through one of its own
MAX_LANE_NAME_BYTES = 128
# A name that is not empty, and what was summed under it, of how many episodes, since the start.
INFO = np.dtype(
    [("name", f"S{episode_info.MAX_INFO_NAME_BYTES}"), ("total", "<f8"), ("count", "<u8")]
)
# A cache line each of the first two.
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
    """The agent wants no more rows from this lane."""


class Lane:
    """Views of one lane's memory; the same for both sides and in each process that maps it."""

    def __init__(self, fd: int, spec: Spec | RolloutSpec, num_envs: int) -> None:
        """Map the memory behind `fd`, which then belongs to the lane.

        With a `RolloutSpec`, `rows` are whole rollouts [K, T+1, ...], and there are no actions.
        """
        self.fd = fd
        self.spec = spec
        self.num_envs = num_envs
        self.wakeup_fd: int | None = None  # written to when the actor passes the turn
        self.marks_rows = True  # as taken (cpp/turn.h); hosts of older versions do not know of it
        self.client = ""  # whose environments these are; the learner's own if empty
        self._memory = np.frombuffer(mmap.mmap(fd, lane_size(spec, num_envs)), np.uint8)
        header = self._memory[: HEADER.itemsize].view(HEADER)[0]
        self.turn = Turn(header["turn"][:1])
        self._counts = memoryview(header["counts"])  # for single numbers sooner than an array
        self._header = header
        self._infos = header["infos"]
        self._info_counts = self._infos["count"]
        self._seen_counts = np.zeros_like(self._info_counts)
        self._seen_infos: dict[int, tuple[str, tuple[float, int]]] = {}  # by their place
        self._info_sums: InfoSums = {}
        self._had_turn = FREE  # what the state must be before our next rows
        self._next_byte = HEADER.itemsize
        self.rows: Row = nest.map(self._view, spec.row)  # [K, ...] each
        self.actions: Any = nest.map(self._view, spec.action)
        # Numbers may be written and read one by one: a few are, sooner than NumPy has started.
        numbers = {k: memoryview(v) for k, v in self.rows.items() if k in NUMBERS}
        self._action_cells: memoryview | None = None
        if count_actions(spec.action) > 0 and spec.action.dtype == "int64":
            self._action_cells = memoryview(self.actions)
            numbers["last_action"] = memoryview(self.rows["last_action"])
        self._fields = [(k, v, numbers.get(k)) for k, v in self.rows.items()]
        self._frame_bytes: list[memoryview] = []  # of each environment, if a frame is one array
        if type(frame := self.rows.get("frame")) is np.ndarray and frame.nbytes > 0:
            flat = frame.reshape(num_envs, -1).view(np.uint8)
            self._frame_bytes = [x.data for x in flat]

    @classmethod
    def create(cls, spec: Spec | RolloutSpec, num_envs: int) -> "Lane":
        fd = anonymous_memory(lane_size(spec, num_envs), "torchbeast-lane")
        try:
            return cls(fd, spec, num_envs)
        except BaseException:  # such as no descriptor left to map it with
            os.close(fd)
            raise

    @property
    def has_rollouts(self) -> bool:
        return isinstance(self.spec, RolloutSpec)

    def fits(self, num_envs: int, client: str, has_rollouts: bool) -> bool:
        """Whether it can be used for such environments of this client."""
        ours = (self.num_envs, self.client, self.has_rollouts)
        return ours == (num_envs, client, has_rollouts)

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
    def num_passes(self) -> int:
        """How often rows were written."""
        return self._counts[0]

    @property
    def name(self) -> str:
        """Who steps its environments, for people; whoever wrote it, it is one short line."""
        text = bytes(self._header["name"]).decode(errors="replace")
        return printable(text)

    @name.setter
    def name(self, name: str) -> None:
        self._header["name"] = name.encode()[:MAX_LANE_NAME_BYTES]

    def read_info(self) -> InfoSums:
        """All that `add_info` has added so far; who writes it may be at work, and anybody.

        The same dict as before if nothing was added.
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
        """Copy frames byte by byte, without NumPy; False if they are not laid out as ours are."""
        view = self.rows["frame"]
        if not self._frame_bytes or frames.dtype is not view.dtype or frames.shape != view.shape:
            return False
        for cells, array in zip(self._frame_bytes, frames.arrays, strict=True):
            if array.dtype is not view.dtype or not array.data.c_contiguous:
                return False
            cells[:] = array.data.cast("B")
        return True

    def read_actions(self, as_list: bool) -> Any:
        """A copy of the actions; a list if each is one integer, and who steps knows of lists."""
        if as_list and self._action_cells is not None:
            return self._action_cells.tolist()
        return nest.map(np.copy, self.actions)

    def add_info(self, info: InfoSums) -> None:
        """Add to the sums that the agent's side reads now and then."""
        for name, (total, count) in info.items():
            for entry in self._infos:
                if entry["name"] in (b"", name.encode()):
                    entry["name"] = name.encode()
                    entry["total"] += total
                    entry["count"] += count
                    break

    def send_rows(self, timeout_s: float = 0.0) -> bool:
        """Give the agent its turn, and `wait_for_actions`.

        Who has nothing else to do waits here: between two calls others would run, and take our
        code out of the caches.
        """
        self._counts[0] += 1
        state = self.turn.exchange(self._had_turn, timeout_s)
        self._had_turn = ENVIRONMENT
        return _has_turn(state)

    def wait_for_actions(self, timeout_s: float) -> bool:
        """Whether `actions` are there; raises `LaneClosed` at the end."""
        return _has_turn(self.turn.wait_for_actions(timeout_s))

    def _view(self, spec: ArraySpec) -> np.ndarray:
        num_bytes = self.num_envs * spec.num_bytes
        flat = self._memory[self._next_byte : self._next_byte + num_bytes]
        self._next_byte += aligned(num_bytes)
        return flat.view(spec.dtype).reshape(self.num_envs, *spec.shape)


def map_lane(fd: int | None, spec: Spec | RolloutSpec, num_envs: int) -> Lane | None:
    """The lane behind a descriptor that was sent here, which is the lane's from then on.

    None if it was lost on the way, if there is no other left to map it with, or if the memory is
    none for a lane: of another size, or such that its sender could end us by making it smaller.
    """
    if fd is None:
        return None
    try:
        size = lane_size(spec, num_envs)
        pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # as some systems have it
        if not can_shrink(fd) and os.fstat(fd).st_size in (size, pages):
            return Lane(fd, spec, num_envs)
    except OSError:
        pass
    os.close(fd)
    return None


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


def lane_size(spec: Spec | RolloutSpec, num_envs: int) -> int:
    """Bytes of a lane's memory."""
    leaves = [*nest.flatten(spec.row), *nest.flatten(spec.action)]
    return HEADER.itemsize + sum(aligned(num_envs * leaf.num_bytes) for leaf in leaves)


def _has_turn(state: Turn.State) -> bool:
    """Whether the environments have it; `LaneClosed` if nobody will any more."""
    if state is ENVIRONMENT:
        return True
    if state is not AGENT:
        raise LaneClosed
    return False


def _copy(view: np.ndarray, value: Any) -> None:
    if value.shape != view.shape:  # NumPy would repeat it where it can
        raise ValueError(f"A row must hold {view.dtype}{view.shape}, got shape {value.shape}.")
    if value.dtype != view.dtype and not np.can_cast(value.dtype, view.dtype, "same_kind"):
        raise TypeError(f"A row must hold {view.dtype}, got {value.dtype}.")
    if isinstance(value, Unstacked):
        for i, array in enumerate(value.arrays):
            view[i] = array
    else:
        view[...] = value
