"""Keeps processes alive: starts them, watches them, restarts them with back-off, or gives them up.

The same `Supervisor` serves MonoBeast's actors, workers, gateways and environment servers. Its
owner calls `poll()` a few times a second. `poll()` waits only while a process that hangs writes its
stack, and until a process that it killed is gone. Pure Python.
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
MAX_GAP_S = 2.0  # the most of the time between two polls that counts as a process's idle time
STACK_S = 1.0  # how long to wait for the stack of a process that hangs
NUM_ACCIDENTS = 5  # failures of the same kind in a minute that are logged one by one
OUTPUT_LINES = 8  # the last printed lines of a process that the report of its end shows
NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # a retry may succeed
MAX_LINE = 300  # characters of a printed line that a report shows
ABORTED = "Fatal Python error: Aborted"  # how faulthandler's text begins
CANNOT_WORK = 78  # exit code (EX_CONFIG): the command line cannot work, a restart would not help
NEVER_WORKED = 70  # exit code (EX_SOFTWARE): its environments have failed from the start
LATE_S = 3.0  # a process without a heartbeat for so long is late
START_S = 60.0  # the least that a process has until its first heartbeat


class BackOff:
    """Growing pauses between retries, with jitter, so that many processes do not retry at once."""

    def __init__(
        self,
        first_s: float = 0.1,
        max_s: float = 10.0,
        factor: float = 2.0,
        jitter: tuple[float, float] = (0.75, 1.25),
    ) -> None:
        """Each pause is multiplied by a random number in the range `jitter`."""
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


FULL_JITTER = (0.0, 1.0)  # for many processes that lost the same peer at the same moment


# --------------------------------------------------------------------------------- the supervisor


class Process(Protocol):
    """What a supervisor needs of a process."""

    @property
    def pid(self) -> int: ...

    def exit_code(self) -> int | None:
        """None while the process runs; -N if signal N killed it."""

    def heartbeat(self) -> int:
        """A counter that grows while the process makes progress or has nothing to do."""

    def read_log(self) -> list[tuple[int, str]]:
        """Levels and texts that the process has logged since the last call."""

    def read_output(self) -> list[str]:
        """Lines that the process has printed since the last call, if its output is caught."""

    def kill(self) -> None:
        """Kill the process and all that it has started; return when it is gone."""


@dataclass
class Child:
    """One process that a supervisor keeps alive, and its state."""

    name: str
    """Its name in logs, such as "Worker 3"."""
    start: Callable[[int], Process]
    """Starts the process, the argument being the number of earlier starts; may raise OSError."""
    on_end: Callable[[], None] = lambda: None
    """Called after the end of the process, whatever the cause: takes back what it held."""
    progress: Callable[[], int] | None = None
    """Counts its steps. Without it, a process that lives for `HEALTHY_S` is healthy."""

    process: Process | None = field(default=None, init=False)
    given_up: bool = field(default=False, init=False)
    last_warning: str = field(default="", init=False)
    """The text of the last warning that it has logged."""
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
        """Whether it has had a heartbeat, but none for `LATE_S`."""
        return self.process is not None and self._has_beaten and self.idle_s >= LATE_S


HEALTHY_S = 30.0  # see Child.progress
HEALTHY_PROGRESS = (
    100  # more steps than a host takes before it ends because its environments keep failing
)


class NobodyLeft(RuntimeError):
    """All processes were given up. The text has the last one's warning, output, and the reason."""


class Supervisor:
    """Keeps processes alive. All methods must be called in the same thread."""

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
        """Processes are started by `poll`, not here.

        A process without a heartbeat for `timeout_s` is killed and restarted; `timeout_flag` is the
        flag that sets this limit, for the log. A child is given up after `max_failures` in a row
        (None: never), or if its process ends with the exit code `final_code` (see `cannot_work`).
        `false_start_code` is the exit code of a process that has never worked: if all have ended
        so `MAX_FAILURES` times and none has ever worked, `poll` raises `NobodyLeft`.
        `keep_output(name, lines)` gets what the processes print.
        """
        self.children = list(children)
        self.timeout_s = timeout_s
        self.num_restarts = 0
        self.cannot_work = False
        """Whether a process has ended with the exit code `final_code`."""
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
        """Time limit of the first heartbeat, as imports take long on a busy machine."""
        return max(self.timeout_s, START_S)

    def poll(self) -> None:
        """Start processes that are due; log what they log; restart those that failed.

        Raises `NobodyLeft` when all are given up.
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
        """Describe, for people, the children that are late, starting or about to be restarted."""
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
        """End a child's process after a failure, then plan a restart or give the child up.

        `what` is the failure, as text. Raises `NobodyLeft` if all children are given up.
        """
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
                f"Every {kind} has failed {number} times in a row and is given up; the last one, "
                f"{child.name}, {_first_line(what)}."
            )
            said = (child.last_warning, _output_of(child), sentence)
            raise NobodyLeft("\n".join(text for text in said if text))

    def _count_false_start(self, child: Child, code: int) -> None:
        """Raise `NobodyLeft` if all have failed `MAX_FAILURES` times and none has ever worked."""
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
        """Log what a child's process has logged, and keep what it has printed."""
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
        """Call `stop`, which asks all processes to end; after `timeout_s`, kill the others."""
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
                for other in self.children:  # a process whose pipe is full could not end
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
            # The machine's fault, not the child's: it is never given up for that.
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
            child._has_worked = True  # a process that hangs has not failed at its start
            self.fail(child, f"has done nothing for {child.idle_s:.0f} s{self._timeout_flag}")

    def _ask_for_stack(self, child: Child) -> None:
        """Make a process that hangs write its stack, by SIGABRT, which mostly ends it; log it."""
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
        """Kill the process, and only then take back what it held (`on_end`)."""
        assert child.process is not None
        self.read_log(child)
        child.process.kill()
        child.process = None
        child.on_end()

    def _log(self, child: Child, level: int, text: str, separator: str = ": ") -> None:
        # The same text is logged once, whichever processes it comes from.
        key = without_numbers(text)
        shown = self._repeats.take(text, child.name + separator, key, level)
        if shown is not None:
            logger.log(level, "%s", shown)


def _output_of(child: Child) -> str:
    """What a process printed last, as text for the report of its end."""
    lines = [printable(line[:MAX_LINE]) for line in child.last_output]
    return "\n".join(["The last that it printed:", *lines]) if lines else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(":")


def describe_exit(code: int) -> str:
    """How a process ended, as text for logs."""
    if code < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
