"""The workers as seen from the learner's process: started, watched over, mended, ended.

Nobody here waits: `poll()` looks around, and the main thread calls it a few times a second.
"""

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libtorchbeast.lanes import (
    DESCRIPTORS_PER_LANE,
    ENVIRONMENT,
    FREE,
    Lane,
    allow_descriptors,
)
from libtorchbeast.specs import Spec
from libtorchbeast.worker import HEALTHY_STEPS, GroupConfig, WorkerConfig

logger = logging.getLogger("torchbeast")

MAX_FAILURES = 5  # in a row, before a worker is given up
MAX_GAP_S = 2.0  # more time between two polls is no sign of a worker's hanging
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 10.0
# Large messages and frames come and go: glibc need not give their memory back each time.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
MAX_SHOWN = 100  # tracebacks; of more, only the last line
JOIN_S = 10.0  # how long to wait for workers that were told to end


@dataclass
class Worker:
    """One worker: its lanes, its process, and how it fares."""

    id: int
    lanes: list[Lane]
    process: subprocess.Popen[bytes] | None = None
    report_fd: int = -1
    unread: bytes = b""
    num_starts: int = 0
    num_failures: int = 0  # in a row
    passes_at_failure: int = 0
    given_up: bool = False
    start_at: float = 0.0
    signs_of_life: int = 0
    idle_s: float = 0.0
    last_words: str = ""

    @property
    def passes(self) -> int:
        return sum(lane.num_passes for lane in self.lanes)


@dataclass
class Workers:
    """Processes that step environments in lanes, `num_lanes` dealt out to `num_workers`."""

    factory: str
    """`package.module:function` that makes a group of environments (see worker.py)."""
    factory_options: dict[str, Any]
    spec: Spec
    num_workers: int
    num_lanes: int
    envs_per_lane: int
    first_seed: int
    env_timeout_s: float = 120.0
    num_restarts: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        allow_descriptors(DESCRIPTORS_PER_LANE * self.num_lanes + 2 * self.num_workers)
        lanes = [Lane.create(self.spec, self.envs_per_lane) for _ in range(self.num_lanes)]
        self._workers = [Worker(i, lanes[i :: self.num_workers]) for i in range(self.num_workers)]
        self._shown: set[str] = set()
        self._polled_at = time.monotonic()

    @property
    def lanes(self) -> list[Lane]:
        return [lane for worker in self._workers for lane in worker.lanes]

    @property
    def num_working(self) -> int:
        return sum(worker.process is not None for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def poll(self) -> None:
        """Start what is to be started, tell and mend what broke."""
        now = time.monotonic()
        # While this process was stopped (Ctrl-Z, a sleeping laptop), so were the workers.
        passed_s, self._polled_at = min(now - self._polled_at, MAX_GAP_S), now
        for worker in self._workers:
            if worker.process is None:
                if not worker.given_up and now >= worker.start_at:
                    self._start(worker)
                continue
            self._read_reports(worker)
            if worker.process.poll() is not None:
                self._mend(worker, describe_exit(worker.process.returncode))
            else:
                self._watch(worker, passed_s)

    def close(self) -> None:
        """End all workers: close their lanes, wait, then kill."""
        for lane in self.lanes:
            lane.turn.close()
        deadline = time.monotonic() + JOIN_S
        for worker in self._workers:
            if worker.process is not None:
                try:
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    logger.warning("Worker %d did not end in time; it is killed.", worker.id)
                self._end(worker)
            for lane in worker.lanes:
                lane.release()

    def _start(self, worker: Worker) -> None:
        # New seeds at each start, or a worker would live through the same bad luck again.
        number = worker.id + self.num_workers * worker.num_starts
        max_lanes = -(-self.num_lanes // self.num_workers)
        seed = self.first_seed + number * self.envs_per_lane * max_lanes
        worker.num_starts += 1
        worker.idle_s = 0.0
        worker.unread = b""
        worker.report_fd, theirs = os.pipe()
        os.set_blocking(worker.report_fd, False)
        config = WorkerConfig(
            factory=self.factory,
            factory_options=self.factory_options,
            spec=self.spec.to_json(),
            groups=[
                GroupConfig(lane.fd, lane.num_envs, seed + i * self.envs_per_lane)
                for i, lane in enumerate(worker.lanes)
            ],
            report_fd=theirs,
            parent=os.getpid(),
        )
        try:
            worker.process = start_helper(
                "libtorchbeast.worker",
                json.dumps(dataclasses.asdict(config)),
                [theirs, *(lane.fd for lane in worker.lanes)],
            )
        finally:
            os.close(theirs)

    def _read_reports(self, worker: Worker) -> None:
        try:
            while chunk := os.read(worker.report_fd, 1 << 16):
                worker.unread += chunk
        except BlockingIOError:
            pass
        *lines, worker.unread = worker.unread.split(b"\n")
        for line in lines:
            worker.last_words = json.loads(line).strip()
            if worker.last_words in self._shown or len(self._shown) >= MAX_SHOWN:
                logger.warning("Worker %d: %s (again)", worker.id, self._summary(worker))
            else:
                self._shown.add(worker.last_words)
                logger.warning(
                    "An environment of worker %d raised:\n%s", worker.id, worker.last_words
                )

    def _watch(self, worker: Worker, passed_s: float) -> None:
        """A worker that has the turn and neither writes nor waits hangs in its environments."""
        signs = sum(lane.signs_of_life for lane in worker.lanes)
        has_turn = any(lane.turn.state in (FREE, ENVIRONMENT) for lane in worker.lanes)
        worker.idle_s += passed_s
        if signs != worker.signs_of_life or not has_turn:
            worker.signs_of_life, worker.idle_s = signs, 0.0
        elif worker.idle_s > self.env_timeout_s:
            self._mend(worker, f"took no step for {worker.idle_s:.0f} s (--env_timeout_s)")

    def _mend(self, worker: Worker, what: str) -> None:
        """Tell what happened to a worker and have it started anew, unless it never works."""
        self._read_reports(worker)
        self._end(worker)
        if worker.passes - worker.passes_at_failure >= HEALTHY_STEPS * len(worker.lanes):
            worker.num_failures = 0
        worker.passes_at_failure = worker.passes
        worker.num_failures += 1
        if worker.num_failures < MAX_FAILURES:
            back_off_s = min(FIRST_BACK_OFF_S * 4 ** (worker.num_failures - 1), MAX_BACK_OFF_S)
            worker.start_at = time.monotonic() + back_off_s
            self.num_restarts += 1
            logger.warning("Worker %d %s; starting it anew.", worker.id, what)
            return
        worker.given_up = True
        logger.error("Worker %d %s; giving it up after %d tries.", worker.id, what, MAX_FAILURES)
        if all(other.given_up for other in self._workers):
            said = f":\n{worker.last_words}" if worker.last_words else "."
            raise RuntimeError(f"No worker is left to train with; the last one {what}{said}")

    def _end(self, worker: Worker) -> None:
        """Make sure that the process is gone; only then is its lanes' memory nobody's."""
        assert worker.process is not None
        kill_group(worker.process)
        worker.process.wait(JOIN_S)
        worker.process = None
        os.close(worker.report_fd)
        for lane in worker.lanes:
            lane.turn.abandon()

    @staticmethod
    def _summary(worker: Worker) -> str:
        return worker.last_words.rsplit("\n", 1)[-1]


def start_helper(module: str, config: str, fds: Sequence[int]) -> subprocess.Popen[bytes]:
    """`python -m module config`, with these descriptors and what Python finds here.

    In a process group of its own: Ctrl-C in a terminal is for the learner alone.
    """
    env = {
        **os.environ,
        **KEEP_FREED_MEMORY,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", module, config]
    return subprocess.Popen(
        command, pass_fds=fds, env=env, stdin=subprocess.DEVNULL, process_group=0
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a helper, and what its environments may have started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """How a process ended, for people."""
    if code < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
