"""A helper: `python -m module CONFIG`, the usual kind of process that a supervisor keeps alive.

It neither imports the user's main module nor inherits threads, it has a heartbeat (a counter in
shared memory that grows while it works), and what it logs comes back over a pipe.

    Helper           the process as its supervisor sees it
    SupervisorLine   the same line, from inside

Nothing here is compiled.
"""

import contextlib
import ctypes
import faulthandler
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from libtorchbeast import secret
from libtorchbeast.memory import anonymous_memory

logger = logging.getLogger("torchbeast")

KILL_S = 10.0  # for a process that was killed to be gone
MAX_UNREAD = 1 << 20  # bytes of a log line that has no end
# Large messages and frames come and go: glibc need not give their memory back each time.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
}
_PR_SET_PDEATHSIG = 1


class Helper:
    """A process of this package, as its supervisor sees it."""

    def __init__(
        self,
        module: str,
        config: dict[str, Any],
        fds: Sequence[int] = (),
        needs_token: bool = False,
    ) -> None:
        """Starts it, with these descriptors and what Python finds here.

        In a process group of its own: Ctrl-C in a terminal is for its parent alone.
        """
        with contextlib.ExitStack() as stack:

            def to_pass(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            line = {"parent": os.getpid()}
            heartbeat_fd = to_pass(anonymous_memory(mmap.PAGESIZE, "torchbeast-heartbeat"))
            line["heartbeat_fd"] = heartbeat_fd
            self._memory = mmap.mmap(heartbeat_fd, mmap.PAGESIZE)
            log_fd, theirs = os.pipe()
            self._log = LogReader(log_fd)
            line["log_fd"] = to_pass(theirs)
            try:
                if needs_token:
                    line["token_fd"] = to_pass(secret.pipe_with_token())
                own_fds = [fd for name, fd in line.items() if name.endswith("_fd")]
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps({"line": line, **config})],
                    pass_fds=[*own_fds, *fds],
                    env=_variables(),
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                self._log.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def heartbeat(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def read_log(self) -> list[tuple[int, str]]:
        return self._log.read()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what its environments have started
        self._process.wait(KILL_S)
        self._log.close()
        self._memory.close()


class LogReader:
    """The reading end of a pipe with a process's log: JSON lines, and what faulthandler writes."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unread = b""

    def read(self) -> list[tuple[int, str]]:
        """Levels and texts of what has come since the last call."""
        try:
            while chunk := os.read(self._fd, 1 << 16):
                self._unread += chunk
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        self._unread = self._unread[:MAX_UNREAD]
        records: list[tuple[int, str]] = []
        plain: list[str] = []  # what faulthandler writes
        for line in lines:
            try:
                level, text = json.loads(line)
                records.append((int(level), str(text)))
            except (ValueError, TypeError):
                plain.append(line.decode(errors="replace"))
        if plain:
            records.append((logging.ERROR, "\n".join(plain)))
        return records

    def close(self) -> None:
        os.close(self._fd)


def _variables() -> dict[str, str]:
    """The environment of a helper: ours, without the token."""
    ours = {name: value for name, value in os.environ.items() if name != secret.VARIABLE}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**ours, **KEEP_FREED_MEMORY, **own}


class SupervisorLine:
    """A helper's line to its supervisor: its heartbeat, and where its log goes."""

    def __init__(self, line: dict[str, int]) -> None:
        """Of the configuration. Sets up the process: signals, logging, its end with its parent."""
        self._parent = line["parent"]
        self._memory = mmap.mmap(line["heartbeat_fd"], mmap.PAGESIZE)
        self._beats = 0
        set_up_child()
        self.exit_if_orphaned()
        self._log = LogWriter(line["log_fd"], on_error=self.exit_if_orphaned)
        if "token_fd" in line:
            with open(line["token_fd"], "rb") as file:
                secret.keep(file.read().decode())
        self.beat()

    def beat(self) -> None:
        """Say that this process lives, and does its work or has none."""
        self._beats += 1
        self._memory[:8] = self._beats.to_bytes(8, "little")

    def tick(self) -> None:
        """For whoever waits: beat, and end with the parent."""
        self.beat()
        self.exit_if_orphaned()

    def exit_if_orphaned(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)

    def send(self, level: int, text: str) -> None:
        self._log.send(level, text)


class LogWriter(logging.Handler):
    """Sends what this process logs, and its stack if it crashes, to its supervisor, and nowhere
    else: that one shows it."""

    def __init__(self, fd: int, on_error: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._on_error = on_error
        faulthandler.enable(self._file)
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [self], False  # a fork has its parent's

    def emit(self, record: logging.LogRecord) -> None:
        self.send(record.levelno, self.format(record))

    def send(self, level: int, text: str) -> None:
        try:
            self._file.write(json.dumps([level, text]).encode() + b"\n")
        except OSError:
            self._on_error()


def set_up_child() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
