"""`python -m module` without the time it takes to import PyTorch: a fork of a process that has.

    WarmPopen   like subprocess.Popen, for the tests
    serve       the process that forks: no thread, nothing computed yet, all of PyTorch imported

A fork gets working directory, variables, standard streams and arguments of its own, then runs the
module as its main program, and ends as any interpreter does.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 120.0  # for the imports, on a busy machine
PRELOADED = ("torchbeast.run.training", "torch.utils.tensorboard", "tensorboard.compat.proto")


class WarmPopen:
    """A process that runs a module, as its parent would see it."""

    def __init__(
        self,
        command: list[str],
        *,
        stdout: int,
        stderr: int,
        cwd: Any = None,
        env: dict[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """`command` is [python, "-m", module, *args]; the streams are descriptors."""
        assert command[:2] == [sys.executable, "-m"], command
        request = {
            "module": command[2],
            "args": command[3:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": start_new_session,
        }
        self.returncode: int | None = None
        self._ended_fd, theirs = os.pipe()
        try:
            self.pid = _server().fork(request, [stdout, stderr, theirs])
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        return self._wait_until_ended(0)

    def wait(self, timeout: float) -> int:
        code = self._wait_until_ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait_until_ended(self, timeout_s: float) -> int | None:
        if self.returncode is None and select.select([self._ended_fd], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._ended_fd, 64) or -signal.SIGKILL)
            os.close(self._ended_fd)
        return self.returncode


class Server:
    """The process that forks, seen from the tests; ends with them."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", "from tests.helpers.warm_python import serve; serve()"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()]
            )
        self._socket.settimeout(START_S)
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """The process's number."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        return int(self._socket.recv(64))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(START_S)


@functools.cache
def _server() -> Server:
    return Server()


# -------------------------------------------------------------------------------- the other process


def serve() -> None:
    """Fork for each request; returns in a fork alone, when its program is over."""
    for module in PRELOADED:
        importlib.import_module(module)
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the tests' terminal
    forks: dict[int, tuple[int, int]] = {}  # pidfd -> process, and where its end is reported
    while True:
        ready, _, _ = select.select([control, *forks], [], [])
        for pidfd in ready:
            if pidfd is not control:
                report_end(pidfd, *forks.pop(pidfd))
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:  # the tests are over
            os._exit(0)
        *streams, ended_fd = fds
        pid = os.fork()
        if pid == 0:
            for fd in (control.detach(), ended_fd, *forks, *(fd for _, fd in forks.values())):
                os.close(fd)
            become(json.loads(data), *streams)
            return
        for fd in streams:
            os.close(fd)
        forks[os.pidfd_open(pid)] = pid, ended_fd
        control.send(str(pid).encode())


def report_end(pidfd: int, pid: int, ended_fd: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(ended_fd, str(code).encode())
    os.close(pidfd)
    os.close(ended_fd)


def become(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Run a module as `python -m` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [request["cwd"], *(path for path in added if path)]
    sys.argv[:] = [request["module"], *request["args"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
