"""MonoBeast's actor processes: multiprocessing's, kept alive by a `Supervisor`.

Each has a pipe to its parent for its work, one for its log, and one for what it prints. The
supervisor (libtorchbeast/supervisor.py) decides when it is started, killed and restarted.
"""

import errno
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from libtorchbeast.groups import describe_failure
from libtorchbeast.helper_process import (
    KILL_S,
    LogReader,
    LogWriter,
    OutputReader,
    open_pipe,
    set_up_child,
)
from torchbeast import user_code

logger = logging.getLogger("torchbeast")

TIDY_END_S = 5.0  # time to close environments after the parent's death


class ParentGone(Exception):
    """The process at the other end of the pipe has ended."""


class ParentPipe:
    """A child's end of the pipe to its parent; raises `ParentGone` if the parent is dead.

    This differs from OSError, so that a broken pipe inside an environment is not taken for it.
    """

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


class ActorProcess:
    """A process that runs a function, for a supervisor; `pipe` is the parent's end of its pipe."""

    def __init__(
        self,
        context: Any,
        name: str,
        function: Callable[..., None],
        args: tuple[Any, ...],
        heartbeat: Callable[[], int],
    ) -> None:
        """Start a process with `function(ParentPipe, *args)`; OSError if the system refuses it.

        `context` is multiprocessing's context for a start method.
        """
        self.heartbeat = heartbeat
        with ExitStack() as undo, ExitStack() as theirs:
            self.pipe, their_pipe = context.Pipe()
            undo.callback(self.pipe.close)
            theirs.callback(their_pipe.close)
            self._log, log_fd = open_pipe(LogReader, undo, theirs)
            self._output, output_fd = open_pipe(OutputReader, undo, theirs)
            # multiprocessing passes descriptors on only in objects of its own.
            handles = [Connection(os.dup(fd), readable=False) for fd in (log_fd, output_fd)]
            for handle in handles:
                theirs.callback(handle.close)
            self._process = context.Process(
                target=_run,
                name=name,
                args=(function, their_pipe, *handles, args, user_code.pack()),
            )
            try:
                with _without_main() if user_code.is_offering() else nullcontext():
                    self._process.start()
            except EOFError as error:  # the fork server could not fork, and ended; it is restarted
                raise OSError(errno.EAGAIN, "the fork server has ended") from error
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.exitcode

    def read_log(self) -> list[tuple[int, str]]:
        return self._log.read()

    def read_output(self) -> list[str]:
        return self._output.read()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also what its environments have started
        self._process.kill()  # if it is not in a process group of its own yet
        self._process.join(KILL_S)
        if self._process.exitcode is None:  # it waits for a device, say
            logger.error("Process %d has not ended %.0f s after SIGKILL.", self.pid, KILL_S)

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        self.pipe.close()
        self._log.close()
        self._output.close()


def _run(
    function: Callable[..., None],
    pipe: Connection,
    log: Connection,
    output: Connection,
    args: tuple[Any, ...],
    code: bytes,
) -> None:
    """The main function of such a process."""
    os.setpgid(0, 0)
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    set_up_child()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # closes environments
    LogWriter(os.dup(log.fileno()))
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        user_code.unpack(code)
        function(ParentPipe(pipe), *args)
    except ParentGone:
        pass
    except Exception as error:
        logger.warning("%s", describe_failure(error))
        sys.exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """While entered, new processes do not import the program's main module.

    multiprocessing's would, which runs the program again if it has no `if __name__ == "__main__"`.
    The program's objects come from `user_code.pack()` instead.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    """A thread that ends this process when its parent has died.

    The main thread sees that only while it uses the pipe. Nor does the system signal it to the
    child of a fork server, as the fork server lives as long as the child.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    time.sleep(TIDY_END_S)
    os._exit(1)
