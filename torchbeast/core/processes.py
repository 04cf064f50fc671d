"""The life and death of helper processes: tidy ends, orphans, and what a death is called."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

TIDY_END_S = 5.0  # after the parent's death, for environments to be closed
_PR_SET_PDEATHSIG = 1


class ParentGone(Exception):
    """The process at the other end of the pipe has ended."""


class ParentPipe:
    """A child's end of the pipe to its parent. The parent's death has an exception of its own,
    so that a broken pipe inside an environment is not taken for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def recv(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ParentGone from error

    def send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise ParentGone from error


def set_up_child() -> None:
    """Leave Ctrl-C to the parent, end tidily when it asks, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    if sys.platform.startswith("linux"):
        # Also where the other end of the pipe was inherited by a sibling, and so stays open.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()


def _end_with(parent: Any) -> None:
    """A child that waits for anything but its pipe does not see that its parent is gone.

    Nor does the system tell it, if it comes from a forkserver: that one lives as long as the child.
    """
    parent.join()
    time.sleep(TIDY_END_S)
    os._exit(1)


def describe_death(process: Any, timeout_s: float) -> str:
    """How a process ended, for people."""
    process.join(timeout_s)
    code = process.exitcode
    if code is not None and code < 0:
        names = {member.value: member.name for member in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
