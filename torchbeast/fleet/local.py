"""A fleet on this machine: this program supervises its servers until it is asked to stop."""

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from libtorchbeast.supervisor import Supervisor
from torchbeast.errors import UsageError
from torchbeast.fleet.flags import Flags
from torchbeast.fleet.state import State, TaskStatus
from torchbeast.fleet.task import run_task, split

STOP_S = 30.0


def start(flags: Flags, state: State) -> int:
    """Start the fleet and run it until it is stopped; returns the exit code."""
    [share] = split(flags)
    state.handle = {"pid": os.getpid(), "host": socket.gethostname()}

    def note(servers: Supervisor) -> bool:
        figures = {"running": len(servers.processes), "restarts": servers.num_restarts}
        if any(state.handle.get(name) != value for name, value in figures.items()):
            state.handle.update(figures)
            with contextlib.suppress(OSError):  # a full disk is no reason to end
                state.write(flags.folder)
        return True

    with _lock(flags.folder) as is_ours:
        if not is_ours:
            raise UsageError(
                f"A fleet named {flags.name} runs already; stop it, or give another --name."
            )
        state.write(flags.folder)
        return run_task(share, False, note)


def status(state: State, folder: Path) -> list[TaskStatus]:
    if not _is_running(state, folder):
        return []
    handle = state.handle
    servers = f"{handle.get('running', 0)} of {state.num_servers}"
    where = f"{handle['host']}, process {handle['pid']}"
    return [TaskStatus("0", "running", where, servers, str(handle.get("restarts", 0)))]


def stop(state: State, folder: Path) -> None:
    deadline = time.monotonic() + STOP_S
    is_asked = False
    while _is_running(state, folder):
        if not is_asked:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(state.handle["pid"], signal.SIGTERM)
            is_asked = True
        if time.monotonic() > deadline:
            raise UsageError(
                f"A fleet must end within {STOP_S:.0f} s of SIGTERM, and process "
                f"{state.handle['pid']} still runs; look at what it prints."
            )
        time.sleep(0.1)


def _is_running(state: State, folder: Path) -> bool:
    """Whether a process holds the fleet's lock; its pid alone may be another process's by now."""
    host = socket.gethostname()
    if state.handle["host"] != host:
        raise UsageError(
            f"The fleet {state.name} is on {state.handle['host']}, and this is {host}; run this "
            "command there."
        )
    with _lock(folder) as is_ours:
        return not is_ours


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock the fleet's folder while entered; yields False if another process holds the lock."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
