"""Helpers: processes `python -m module CONFIG` that a supervisor starts and keeps alive.

A helper neither imports the user's main module nor inherits threads. Its heartbeat is a counter in
shared memory that grows while it works; what it logs and prints comes back over pipes.

    Helper           the process, as its supervisor sees it
    SupervisorLine   the supervisor, as the helper sees it

Pure Python.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import importlib.metadata
import io
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from libtorchbeast import secret
from libtorchbeast.malloc import KEEP_FREED_MEMORY
from libtorchbeast.shared_memory import anonymous_memory

logger = logging.getLogger("torchbeast")

KILL_S = 10.0  # how long to wait for the end of a process that was killed
MAX_UNREAD = 1 << 20  # bytes of a line that are kept while its end has not come
MAX_READS = 64  # of 64 KiB, in one call
LOOK_S = 0.2  # between two checks that the parent is alive
OUTPUT_PIPE_BYTES = 1 << 18
# With these experiments off, the thread that waits for a message also reads the socket, in place
# of gRPC's own threads.
GRPC_READS_IN_PLACE = "-event_engine_client,-event_engine_listener"
LAST_TRIED_GRPC = (1, 85)  # later versions may print an error for each name that they do not know
_PR_SET_PDEATHSIG = 1
_IOLBF = 1  # stdio.h: line buffering


class Helper:
    """A helper process, as its supervisor sees it; a `Process` (supervisor.py)."""

    def __init__(
        self,
        module: str,
        config: dict[str, Any],
        fds: Sequence[int] = (),
        needs_token: bool = False,
        catch_output: bool = False,
        data: bytes = b"",
    ) -> None:
        """Start the process. It inherits `fds` and sys.path, and gets `config` (JSON) and `data`.

        It has its own process group, so that Ctrl-C in a terminal reaches only its parent. With
        `catch_output`, `read_output` returns what it prints; else it shares our stdout and stderr.
        """
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            line = {"parent": os.getpid()}
            line["heartbeat_fd"] = anonymous_memory(mmap.PAGESIZE, "torchbeast-heartbeat")
            theirs.callback(os.close, line["heartbeat_fd"])
            self._memory = mmap.mmap(line["heartbeat_fd"], mmap.PAGESIZE)
            undo.callback(self._memory.close)
            self._log, line["log_fd"] = open_pipe(LogReader, undo, theirs)
            self._output, output_fd = None, None
            if catch_output:
                self._output, output_fd = open_pipe(OutputReader, undo, theirs)
            if needs_token:
                line["token_fd"] = secret.pipe_with_token()
                theirs.callback(os.close, line["token_fd"])
            if data:
                line["data_fd"] = anonymous_memory(len(data), "torchbeast-data")
                theirs.callback(os.close, line["data_fd"])
                os.pwrite(line["data_fd"], data, 0)
            own_fds = [fd for name, fd in line.items() if name.endswith("_fd")]
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps({"line": line, **config})],
                pass_fds=[*own_fds, *fds],
                env=_variables(),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                process_group=0,
            )
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def heartbeat(self) -> int:
        return int.from_bytes(self._memory[:8], "little")

    def terminate(self) -> None:
        """Ask the process to end, by SIGTERM."""
        self._process.terminate()

    def read_log(self) -> list[tuple[int, str]]:
        return self._log.read()

    def read_output(self) -> list[str]:
        return [] if self._output is None else self._output.read()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what its environments have started
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:  # it is in a system call, which it must finish first
            logger.error("Process %d has not ended %.0f s after SIGKILL.", self.pid, KILL_S)
        self._log.close()
        if self._output is not None:
            self._output.close()
        self._memory.close()


class PipeReader:
    """The reading end of a pipe from a process. Reads whole lines, without waiting."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unread = b""

    def read_lines(self) -> list[bytes]:
        """The lines that have come since the last call."""
        is_over = False
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_READS):  # a process that prints without pause must not block us
                chunk = os.read(self._fd, 1 << 16)
                is_over = not chunk
                if is_over:
                    break
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > (0 if is_over else MAX_UNREAD):
            lines.append(self._unread)
            self._unread = b""
        return lines

    def close(self) -> None:
        os.close(self._fd)


class LogReader(PipeReader):
    """Reads a process's log: lines of JSON, and plain ones that faulthandler writes."""

    def read(self) -> list[tuple[int, str]]:
        """Levels and texts of the messages that have come since the last call."""
        records: list[tuple[int, str]] = []
        plain: list[str] = []  # what faulthandler writes
        for line in self.read_lines():
            try:
                level, text = json.loads(line)
                records.append((int(level), str(text)))
            except (ValueError, TypeError):
                if not line.startswith(b"Extension modules:"):  # a long list of no use
                    plain.append(line.decode(errors="replace"))
        if text := "\n".join(plain).strip():
            records.append((logging.ERROR, text))
        return records


class OutputReader(PipeReader):
    """Reads what a process prints. The pipe is large, so that printing hardly ever has to wait."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # the user's pipes may be at their limit of memory
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, OUTPUT_PIPE_BYTES)

    def read(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.read_lines()]


Reader = TypeVar("Reader", bound=PipeReader)


def open_pipe(
    kind: type[Reader], undo: contextlib.ExitStack, theirs: contextlib.ExitStack
) -> tuple[Reader, int]:
    """Open a pipe; return its reader, which `undo` closes, and its writing end, for `theirs`."""
    ours, writer_fd = os.pipe()
    theirs.callback(os.close, writer_fd)
    reader = kind(ours)
    undo.callback(reader.close)
    return reader, writer_fd


def _variables() -> dict[str, str]:
    """The environment variables of a helper: ours without the token, and some settings."""
    ours = {name: value for name, value in os.environ.items() if name != secret.VARIABLE}
    # Errors of peers are in our own log; gRPC would print a line for each call.
    quiet = {"GRPC_VERBOSITY": "NONE"}
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**quiet, **ours, **KEEP_FREED_MEMORY, **own, **_experiments(ours)}


def _experiments(ours: dict[str, str]) -> dict[str, str]:
    """The variable that sets `GRPC_READS_IN_PLACE`. The user's value follows, and overrides it."""
    name = "GRPC_EXPERIMENTS"
    with contextlib.suppress(ImportError, ValueError):  # no gRPC, or an unusual version number
        version = importlib.metadata.version("grpcio").split(".")[:2]
        if tuple(map(int, version)) <= LAST_TRIED_GRPC:
            return {name: ",".join(filter(None, (GRPC_READS_IN_PLACE, ours.get(name))))}
    return {}


class SupervisorLine:
    """A helper's line to its supervisor: for its heartbeat and its log."""

    def __init__(self, line: dict[str, int]) -> None:
        """Set up this process: signals, logging, its end if the parent ends.

        `line` is that entry of the configuration.
        """
        self._parent = line["parent"]
        self._memory = mmap.mmap(line["heartbeat_fd"], mmap.PAGESIZE)
        self._beats = 0
        self._looks_at = 0.0
        set_up_child()
        self.exit_if_orphaned()
        self._log = LogWriter(line["log_fd"], on_error=self.exit_if_orphaned)
        if "token_fd" in line:
            with open(line["token_fd"], "rb") as file:
                secret.keep(file.read().decode())
        self.data = b""
        """The bytes that the parent process gave to `Helper`."""
        if "data_fd" in line:
            with open(line["data_fd"], "rb") as file:
                self.data = file.read()
        self.beat()

    def beat(self) -> None:
        """Increment the heartbeat: this process makes progress, or has nothing to do."""
        self._beats += 1
        self._memory[:8] = self._beats.to_bytes(8, "little")

    def tick(self) -> None:
        """Beat, and exit if the parent has ended. For loops that wait; may be called often."""
        self.beat()
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + LOOK_S
            self.exit_if_orphaned()

    def exit_if_orphaned(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)

    def send(self, level: int, text: str) -> None:
        self._log.send(level, text)


class LogWriter(logging.Handler):
    """Sends this process's log, and its stack if it crashes, to the supervisor, which shows it."""

    def __init__(self, fd: int, on_error: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._on_error = on_error
        faulthandler.enable(self._file)
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [self], False  # a fork inherits its parent's handlers

    def emit(self, record: logging.LogRecord) -> None:
        self.send(record.levelno, self.format(record))

    def send(self, level: int, text: str) -> None:
        try:
            self._file.write(json.dumps([level, text]).encode() + b"\n")
        except OSError:
            self._on_error()


def set_up_child() -> None:
    """Ignore Ctrl-C, die with the parent (on Linux), and flush output after each line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a fork has its parent's live view
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)  # for C libraries
