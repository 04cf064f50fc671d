"""Processes that are kept alive: started, watched, restarted with back-off, given up, explained.

One `Supervisor` for all kinds: MonoBeast's actors, workers, gateways, environment servers. Its
owner calls `poll()` a few times a second; that waits only for a process that hangs to write its
stack, and for one that was killed to be gone. Nothing here is compiled.
"""

import contextlib
import errno
import logging
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from libtorchbeast.log_repeats import RepeatFilter, without_numbers
from libtorchbeast.text import printable

logger = logging.getLogger("torchbeast")

MAX_FAILURES = 5  # in a row, before a process is given up
MAX_GAP_S = 2.0  # more time between two polls says nothing about the processes
STACK_S = 1.0  # for a process that hangs to say where
NUM_ACCIDENTS = 5  # of the same kind that are logged one by one, in a minute
OUTPUT_LINES = 8  # of what a process has printed, in the report of its end
NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # later there may be
MAX_LINE = 300  # characters of a printed line that a report shows
ABORTED = "Fatal Python error: Aborted"  # what faulthandler begins with
CANNOT_WORK = 78  # exit code (EX_CONFIG): what the command line says cannot work, now or later
NEVER_WORKED = 70  # exit code (EX_SOFTWARE): its environments have failed from the start
LATE_S = 3.0  # without a heartbeat
START_S = 60.0  # until the first heartbeat of a process, if its timeout is less


class BackOff:
    """Pauses that grow, each a little different, so that many do not come back at once."""

    def __init__(
        self,
        first_s: float = 0.1,
        max_s: float = 10.0,
        factor: float = 2.0,
        jitter: tuple[float, float] = (0.75, 1.25),
    ) -> None:
        """Each pause is multiplied by a number between those of `jitter`."""
        self._first_s = self._pause_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._jitter = jitter

    def reset(self) -> None:
        self._pause_s = self._first_s

    def next_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(self._factor * pause_s, self._max_s)
        return pause_s * random.uniform(*self._jitter)


FULL_JITTER = (0.0, 1.0)  # for many that lost the same peer at the same moment


# --------------------------------------------------------------------------------- the supervisor


class Process(Protocol):
    """What a supervisor must know of a process."""

    @property
    def pid(self) -> int: ...

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""

    def heartbeat(self) -> int:
        """Another number whenever it has done something, or has nothing to do."""

    def read_log(self) -> list[tuple[int, str]]:
        """Levels and texts of what it has logged since the last call."""

    def read_output(self) -> list[str]:
        """Lines of what it has printed since the last call, if that is anybody's business."""

    def kill(self) -> None:
        """End it and whatever it has started; returns when it is gone."""


@dataclass
class Child:
    """One process that a supervisor keeps alive, and how it fares."""

    name: str
    """As logs call it: Worker 3."""
    start: Callable[[int], Process]
    """Start the process; gets the number of starts before. OSError: it cannot be started now."""
    on_end: Callable[[], None] = lambda: None
    """Called after its death, whatever the cause: take back what it held."""
    progress: Callable[[], int] | None = None
    """Counts its work. Without it, a process that lives for `HEALTHY_S` is healthy."""

    process: Process | None = field(default=None, init=False)
    given_up: bool = field(default=False, init=False)
    last_warning: str = field(default="", init=False)
    """The text of the last warning it logged."""
    last_output: deque[str] = field(default_factory=lambda: deque(maxlen=OUTPUT_LINES), init=False)
    """The last lines that it has printed."""
    idle_s: float = field(default=0.0, init=False)
    _num_starts: int = field(default=0, init=False)
    _failures_in_a_row: int = field(default=0, init=False)
    _num_false_starts: int = field(default=0, init=False)
    _has_worked: bool = field(default=False, init=False)
    _back_off: BackOff = field(default_factory=lambda: BackOff(factor=4.0), init=False)
    _start_at: float = field(default=0.0, init=False)
    _started_at: float = field(default=0.0, init=False)
    _progress_at_failure: int = field(default=0, init=False)
    _heartbeat: int = field(default=0, init=False)
    _has_beaten: bool = field(default=False, init=False)

    @property
    def is_late(self) -> bool:
        """Whether it has worked, and does nothing for some time."""
        return self.process is not None and self._has_beaten and self.idle_s >= LATE_S


HEALTHY_S = 30.0  # see Child.progress
HEALTHY_PROGRESS = (
    100  # more steps than a host takes that ends because its environments keep failing
)


class NobodyLeft(RuntimeError):
    """All processes were given up; the text says what the last one said, and then one sentence."""


class Supervisor:
    """Keeps processes alive. All methods are for one thread."""

    def __init__(
        self,
        children: Sequence[Child],
        timeout_s: float,
        timeout_flag: str = "",
        max_failures: int | None = MAX_FAILURES,
        final_code: int | None = None,
        false_start_code: int | None = None,
        keep_output: Callable[[str, list[str]], None] | None = None,
    ) -> None:
        """A process whose heartbeat stops for `timeout_s` is killed; `timeout_flag` names the limit
        to users. After `max_failures` in a row a child is given up; None: never. One that ends with
        `final_code` is not started again (`cannot_work`). `false_start_code` says that a process
        has never worked: `NobodyLeft` if all end with it `MAX_FAILURES` times, and never otherwise.
        `keep_output(name, lines)` gets what the processes print."""
        self.children = list(children)
        self.timeout_s = timeout_s
        self.num_restarts = 0
        self.cannot_work = False
        """A process has said so, by its exit code."""
        self._timeout_flag = f" ({timeout_flag})" if timeout_flag else ""
        self._max_failures = max_failures
        self._final_code = final_code
        self._false_start_code = false_start_code
        self._polled_at = time.monotonic()
        self._keep_output = keep_output
        self._repeats = RepeatFilter()
        self._accidents = RepeatFilter(times=NUM_ACCIDENTS)

    @property
    def processes(self) -> list[Process]:
        return [child.process for child in self.children if child.process is not None]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    @property
    def _start_s(self) -> float:
        """Until the first heartbeat: a busy machine takes its time to import what is needed."""
        return max(self.timeout_s, START_S)

    def poll(self) -> None:
        """Start what is to be started; log and restart what broke.

        `NobodyLeft` with the last warning of the last one when all are given up.
        """
        now = time.monotonic()
        # While this process was stopped (Ctrl-Z, a sleeping laptop), so were the others.
        passed_s, self._polled_at = min(now - self._polled_at, MAX_GAP_S), now
        for child in self.children:
            if child.process is None:
                if not child.given_up and now >= child._start_at:
                    self._start(child)
                continue
            self.read_log(child)
            code = child.process.exit_code()
            if code is not None and code == self._final_code:
                self.cannot_work = child.given_up = True
                self._end(child)
            elif code is not None:
                self.fail(child, describe_exit(code))
                self._count_false_start(child, code)
            else:
                self._watch(child, passed_s)
        for level, text in [*self._repeats.overdue(), *self._accidents.overdue()]:
            logger.log(level, "%s", text)

    @property
    def has_late(self) -> bool:
        return any(child.is_late for child in self.children)

    def late(self) -> list[str]:
        """Who has done nothing for some time, and what becomes of it, for people."""
        names = []
        for child in self.children:
            if child.given_up:
                continue
            if child.process is None:
                names.append(f"{child.name} (restarts in a moment)")
            elif not child._has_beaten:
                names.append(f"{child.name} (starting for {child.idle_s:.0f} s)")
            elif child.is_late:
                limit = f"restarted after {self.timeout_s:.0f}"
                names.append(f"{child.name} (busy for {child.idle_s:.0f} s, {limit})")
        return names

    def fail(self, child: Child, what: str) -> None:
        """End a child that did something wrong, and restart it later unless it never works."""
        if child.process is not None:
            self._end(child)
        progress = child.progress() if child.progress else 0
        if child.progress:
            healthy = progress - child._progress_at_failure >= HEALTHY_PROGRESS
        else:
            healthy = time.monotonic() - child._started_at >= HEALTHY_S
        child._progress_at_failure = progress
        if healthy:
            child._failures_in_a_row = 0
            child._back_off.reset()
        child._failures_in_a_row += 1
        if self._max_failures is None or child._failures_in_a_row < self._max_failures:
            child._start_at = time.monotonic() + child._back_off.next_s()
            self.num_restarts += 1
            self._report_end(child, f"{what}; restarting it.")
            return
        child.given_up = True
        number = child._failures_in_a_row
        self._report_end(child, f"{what}; giving it up after {number} failures in a row.")
        if all(other.given_up for other in self.children):
            kind = child.name.split()[0].lower()
            sentence = (
                f"No {kind} is left to work with: all failed {number} times in a row, and the "
                f"last, {child.name}, {_first_line(what)}."
            )
            said = (child.last_warning, _output_of(child), sentence)
            raise NobodyLeft("\n".join(text for text in said if text))

    def _count_false_start(self, child: Child, code: int) -> None:
        """`NobodyLeft` if nothing has worked since the start; what has will again, some day."""
        if code == self._false_start_code:
            child._num_false_starts += 1
        else:
            child._has_worked = True
        now = time.monotonic()
        for other in self.children:
            is_alive = other.process is not None and now - other._started_at >= HEALTHY_S
            if is_alive or other._has_worked or other._num_false_starts < MAX_FAILURES:
                return
        sentence = (
            f"No environment has ever worked: all processes have failed {MAX_FAILURES} times from "
            "the start; correct the environment, then start again."
        )
        raise NobodyLeft("\n".join(text for text in (child.last_warning, sentence) if text))

    def _report_end(self, child: Child, what: str) -> None:
        shown = self._accidents.take(what, f"{child.name} ", key=without_numbers(what))
        if shown is not None:
            output = _output_of(child)
            logger.warning("%s", f"{shown}\n{output}" if output else shown)

    def read_log(self, child: Child) -> None:
        """Log what a child has logged, and keep what it has printed."""
        assert child.process is not None
        for level, text in child.process.read_log():
            if level >= logging.WARNING:
                child.last_warning = text
            self._log(child, level, text)
        lines = child.process.read_output()
        if lines:
            child.last_output.extend(lines)
            if self._keep_output is not None:
                self._keep_output(child.name, lines)

    def close(self, stop: Callable[[], None], timeout_s: float) -> None:
        """Call `stop`, which asks all to end; wait, then kill. Nothing is left running."""
        stop()
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            if child.process is None:
                continue
            while child.process.exit_code() is None:
                if time.monotonic() > deadline:
                    logger.warning("%s did not end in time; it is killed.", child.name)
                    break
                time.sleep(0.01)
                for other in self.children:  # whose pipes may be full
                    if other.process is not None:
                        self.read_log(other)
            self._end(child)

    def _start(self, child: Child) -> None:
        child.idle_s = 0.0
        child._has_beaten = False
        child._started_at = time.monotonic()
        child.last_output.clear()
        try:
            child.process = child.start(child._num_starts)
        except OSError as error:
            what = f"cannot be started ({error})"
            if error.errno not in NO_ROOM:
                self.fail(child, what)
                return
            # Not its own fault, however often it happens: it is never given up for that.
            child._start_at = time.monotonic() + child._back_off.next_s()
            self._log(child, logging.WARNING, f"{what}; trying again.", separator=" ")
            return
        child._num_starts += 1
        child._heartbeat = child.process.heartbeat()

    def _watch(self, child: Child, passed_s: float) -> None:
        assert child.process is not None
        heartbeat = child.process.heartbeat()
        child.idle_s += passed_s
        if heartbeat != child._heartbeat:
            child._heartbeat, child.idle_s, child._has_beaten = heartbeat, 0.0, True
        elif child.idle_s > (self.timeout_s if child._has_beaten else self._start_s):
            self._ask_for_stack(child)
            child._has_worked = True  # or it would have failed by itself
            self.fail(child, f"has done nothing for {child.idle_s:.0f} s{self._timeout_flag}")

    def _ask_for_stack(self, child: Child) -> None:
        """Let a process that hangs say where; it ends of that, if it can."""
        assert child.process is not None
        child.last_warning = ""
        with contextlib.suppress(OSError):
            os.kill(child.process.pid, signal.SIGABRT)
        deadline = time.monotonic() + STACK_S
        while child.process.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        stack = "\n".join(text for _, text in child.process.read_log())
        if stack:
            child.last_warning = "It hangs here:\n" + stack.removeprefix(ABORTED).strip()
            self._log(child, logging.WARNING, child.last_warning)

    def _end(self, child: Child) -> None:
        """Make sure that the process is gone; only then does what it held belong to nobody."""
        assert child.process is not None
        self.read_log(child)
        child.process.kill()
        child.process = None
        child.on_end()

    def _log(self, child: Child, level: int, text: str, separator: str = ": ") -> None:
        # The same text is logged once, whoever said it.
        key = without_numbers(text)
        shown = self._repeats.take(text, child.name + separator, key, level)
        if shown is not None:
            logger.log(level, "%s", shown)


def _output_of(child: Child) -> str:
    """What a process printed before its end, for people."""
    lines = [printable(line[:MAX_LINE]) for line in child.last_output]
    return "\n".join(["The last that it printed:", *lines]) if lines else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(":")


def describe_exit(code: int) -> str:
    """How a process ended, for people."""
    if code < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
