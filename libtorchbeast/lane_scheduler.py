"""A scheduler of coroutines, by which one thread steps many groups, each on its own lane.

While the agent computes actions for one group, another one steps. Coroutines may wait for their
turn on a lane, for a message on a local socket, or for some time; asyncio's futures do not work
here. Waiting for a lane is waiting for a word in shared memory, which takes a few microseconds
where an event loop takes fifty.
"""

import select
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from libtorchbeast.episode_info import InfoSums
from libtorchbeast.json_socket import JsonSocket
from libtorchbeast.rows import Row
from libtorchbeast.shared_lanes import Lane, LaneClosed

TICK_S = 0.25  # the interval of ticks, and the longest wait for one lane
IDLE_S = 0.005  # the wait for each lane if none of several lanes was ready the last time
SOCKETS_S = 0.1  # between two polls of sockets while there are lanes


@types.coroutine
def _wait(for_: Any) -> Generator[Any, Any, Any]:
    return (yield for_)


async def pause(seconds: float) -> None:
    """Suspend this coroutine for so long, while others run."""
    await _wait(_Moment(time.monotonic() + seconds))


async def readable(connection: Any, timeout_s: float) -> None:
    """Wait until `connection` has something to read; raises TimeoutError."""
    await _wait(_Readable(connection, time.monotonic() + timeout_s))


async def next_message(connection: JsonSocket, timeout_s: float) -> dict[str, Any]:
    """Wait for the next message; raises TimeoutError, and what `JsonSocket.next` raises."""
    deadline = time.monotonic() + timeout_s
    while True:
        message = connection.next()
        if message is not None:
            return message
        await readable(connection, max(0.0, deadline - time.monotonic()))


class LaneLink:
    """A `Link` (env_host.py) over a lane."""

    def __init__(self, lane: Lane, connection: JsonSocket | None = None) -> None:
        """`connection` is to the process that sent us the lane, which closes it to end the link."""
        self.lane = lane
        self._connection = connection
        self.message: dict[str, Any] | None = None  # from that process: why the link has ended
        self.has_actions = False
        self.keeps_waiting = False

    async def attach(self) -> None:
        """Wait until the lane is free: its actor may still take a rollout of other environments."""
        while True:
            try:
                self.lane.attach(0)
                return
            except TimeoutError:
                await pause(IDLE_S)

    async def show(self, row: Row, info: InfoSums | None = None) -> Any:
        """Send a row and return the agent's actions; raises `LaneClosed` when the link ends."""
        self.lane.write(row)
        if info:
            self.lane.add_info(info)
        await _wait(self)  # the scheduler sends them
        return self.lane.read_actions(as_list=type(row["done"]) is list)

    def check(self) -> None:
        """Raise `LaneClosed` if the process that sent us the lane has closed `connection`."""
        if self._connection is None:
            return
        try:
            self.message = self._connection.next()
        except (EOFError, ValueError, OSError) as error:
            raise LaneClosed from error
        if self.message is not None:
            raise LaneClosed


@dataclass(eq=False)
class _Moment:
    at: float


@dataclass(eq=False)
class _Readable:
    connection: Any
    deadline: float


@dataclass(eq=False)
class _Task:
    coroutine: Coroutine[Any, Any, None]
    waits_for: Any = None


class LaneScheduler:
    """Runs coroutines. Except for `stop`, its methods are for one thread."""

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` is called at least a few times a second."""
        self._tick = tick
        self._on_lanes: deque[_Task] = deque()
        self._others: list[_Task] = []
        self._is_stopped = False
        self._looked_at = 0.0
        self._polled_at = 0.0

    def add(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._resume(_Task(coroutine))

    def stop(self) -> None:
        """Make `run` return soon; may be called in any thread, or in a signal handler."""
        self._is_stopped = True

    def run(self) -> None:
        """Run until all coroutines have ended, or `stop()`; raises what a coroutine raises."""
        try:
            while not self._is_stopped and (self._on_lanes or self._others):
                if self._on_lanes:
                    self._next_turn()
                now = time.monotonic()
                if self._others and (not self._on_lanes or now - self._polled_at >= SOCKETS_S):
                    self._poll_others(now)
                if now - self._looked_at >= TICK_S:
                    self._looked_at = now
                    self._tick()
                    self._check_links()
        finally:
            self._close()

    def _next_turn(self) -> None:
        """Wait for the next lane and resume its coroutine, or put the lane at the end of the queue.

        A lane that was not ready the last time is not waited for while another one was ready.
        """
        task = self._on_lanes.popleft()
        link: LaneLink = task.waits_for
        timeout_s = TICK_S
        if link.keeps_waiting and self._on_lanes:
            busy = any(not other.waits_for.keeps_waiting for other in self._on_lanes)
            timeout_s = 0.0 if busy else IDLE_S
        try:
            is_ready = link.has_actions or link.lane.wait_for_actions(timeout_s)
        except LaneClosed as closed:
            self._resume(task, closed)
            return
        link.keeps_waiting = not is_ready
        if is_ready:
            self._resume(task)
        else:
            self._on_lanes.append(task)

    def _poll_others(self, now: float) -> None:
        """Resume those whose message or time has come; wait for one if there are no lanes."""
        self._polled_at = now
        poll = select.poll()
        wake_at = now + TICK_S
        by_fd: dict[int, list[_Task]] = {}
        for task in self._others:
            if isinstance(task.waits_for, _Readable):
                fd = task.waits_for.connection.fileno()
                by_fd.setdefault(fd, []).append(task)
                poll.register(fd, select.POLLIN)
                wake_at = min(wake_at, task.waits_for.deadline)
            else:
                wake_at = min(wake_at, task.waits_for.at)
        timeout_s = 0.0 if self._on_lanes else max(0.0, wake_at - now)
        ready = {task for fd, _ in poll.poll(1000 * timeout_s) for task in by_fd[fd]}
        now = time.monotonic()
        for task in list(self._others):
            error = None
            if isinstance(task.waits_for, _Readable) and task not in ready:
                if now < task.waits_for.deadline:
                    continue
                error = TimeoutError("Nothing came in time.")
            elif isinstance(task.waits_for, _Moment) and now < task.waits_for.at:
                continue
            self._others.remove(task)
            self._resume(task, error)

    def _check_links(self) -> None:
        for task in list(self._on_lanes):
            try:
                task.waits_for.check()
            except LaneClosed as closed:
                self._on_lanes.remove(task)
                self._resume(task, closed)

    def _resume(self, task: _Task, error: BaseException | None = None) -> None:
        try:
            if error is None:
                task.waits_for = task.coroutine.send(None)
            else:
                task.waits_for = task.coroutine.throw(error)
        except StopIteration:
            return
        if isinstance(task.waits_for, LaneLink):
            self._send_rows(task)
        else:
            self._others.append(task)

    def _send_rows(self, task: _Task) -> None:
        link: LaneLink = task.waits_for
        is_alone = not self._on_lanes
        try:
            link.has_actions = link.lane.send_rows(SOCKETS_S if is_alone else 0.0)
        except LaneClosed as closed:
            self._resume(task, closed)
            return
        self._on_lanes.append(task)

    def _close(self) -> None:
        for task in [*self._on_lanes, *self._others]:
            task.coroutine.close()
        self._on_lanes.clear()
        self._others.clear()
