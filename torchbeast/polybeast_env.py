"""PolyBeast's environments, for a learner in another process or on another machine.

    python -m torchbeast.polybeast_env --env Catch --num_servers 4
        server i listens at unix:/tmp/polybeast.<i>, and the learner dials
    python -m torchbeast.polybeast_env --env Catch --connect learner:4242
        the learner listens, and the environments dial in

Each server is a process; this one watches over them until Ctrl-C or SIGTERM.
"""

import contextlib
import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import tyro

from libtorchbeast.rpc.environments import CANNOT_WORK, EnvironmentsConfig
from libtorchbeast.rpc.security import Security, server_address
from libtorchbeast.workers import describe_exit, kill_group, start_helper
from torchbeast.core.signals import StopRequest
from torchbeast.envs import EnvOptions, check_env, make_envs
from torchbeast.errors import UsageError

logger = logging.getLogger("torchbeast")

POLL_S = 0.2
STOP_S = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
HEALTHY_S = 30.0  # who lived so long starts anew at once


@dataclass(frozen=True)
class Flags(EnvOptions, Security):
    """Run environments for a PolyBeast learner elsewhere."""

    pipes_basename: str = "unix:/tmp/polybeast"
    """Server i listens at <pipes_basename>.<i>; with host:port, at the ports from there on."""
    connect: str | None = None
    """Dial a learner that listens at this address, instead of listening."""
    num_servers: int = 4
    """Processes."""
    envs_per_server: int = 16
    """Environments of a process. One half steps while the agent thinks about the other."""
    env_timeout_s: float = 120.0
    """A process whose environments take longer for one step is ended and started anew."""
    seed: int | None = None
    """Of the environments. None: another one at each start, and so on each machine."""

    @property
    def num_streams(self) -> int:
        """Of each server: two, or one if its environments have no halves."""
        return 2 if self.envs_per_server % 2 == 0 else 1

    def address(self, number: int) -> str:
        """Where server `number` listens, or dials."""
        if self.connect is not None:
            return self.connect
        return server_address(self.pipes_basename, number)

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""
        for name in ("num_servers", "envs_per_server", "env_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0, got {getattr(self, name)}.")
        check_env(self.env)
        try:
            for number in range(self.num_servers):
                address = self.address(number)
                check = self.check_listening if self.connect is None else self.check_dialing
                check(address)
        except ValueError as error:
            raise UsageError(str(error)) from error
        make_envs(self.env_options, num_envs=1).close()  # better one sentence here than ten there


@dataclass
class ServerProcess:
    """One server and how it fares."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class Servers:
    """All of them: started, watched over, mended, ended."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._servers = [ServerProcess(number) for number in range(flags.num_servers)]
        self.cannot_work = False

    def poll(self) -> None:
        """Start what is to be started; tell and mend what broke."""
        now = time.monotonic()
        for server in self._servers:
            if server.process is None:
                if now >= server.start_at:
                    self._start(server)
            elif server.process.poll() is not None:
                self._mend(server, now)

    def close(self) -> None:
        """End all of them: ask, wait, then kill."""
        running = [server.process for server in self._servers if server.process is not None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            kill_group(process)  # and whatever its environments had started
            process.wait(STOP_S)

    def _start(self, server: ServerProcess) -> None:
        # New seeds at each start, or environments would live through the same bad luck again.
        number = server.number + self._flags.num_servers * server.num_starts
        seed = self._flags.seed
        if seed is None:
            seed = random.SystemRandom().randrange(2**31)
        config = EnvironmentsConfig(
            factory="torchbeast.groups:make_group",
            factory_options=dataclasses.asdict(self._flags.env_options),
            num_envs=self._flags.envs_per_server // self._flags.num_streams,
            num_streams=self._flags.num_streams,
            seed=(seed + 1_000_003 * number) % 2**31,
            env_timeout_s=self._flags.env_timeout_s,
            address=self._flags.address(server.number),
            dial=self._flags.connect is not None,
            name=f"{self._flags.env} {server.number}",
            security=Security.of(self._flags).to_json(),
            parent=os.getpid(),
        )
        server.num_starts += 1
        server.started_at = time.monotonic()
        server.process = start_helper("libtorchbeast.rpc.environments", config.to_json(), [])

    def _mend(self, server: ServerProcess, now: float) -> None:
        assert server.process is not None
        code = server.process.returncode
        kill_group(server.process)  # what its environments had started
        server.process = None
        if code == CANNOT_WORK:
            self.cannot_work = True
            return
        if now - server.started_at > HEALTHY_S:
            server.pause_s = FIRST_PAUSE_S
        server.start_at = now + server.pause_s
        server.pause_s = min(2 * server.pause_s, MAX_PAUSE_S)
        logger.warning("Server %d %s; starting it anew.", server.number, describe_exit(code))


def run(flags: Flags) -> int:
    """Until told to stop. Returns the exit code."""
    with StopRequest() as stop:
        servers = Servers(flags)
        where = (
            f"dialing {flags.connect}" if flags.connect else f"listening at {flags.address(0)} ..."
        )
        logger.info("%d servers of %d environments, %s", flags.num_servers,
                    flags.envs_per_server, where)  # fmt: skip
        try:
            while stop.signal is None and not servers.cannot_work:
                servers.poll()
                time.sleep(POLL_S)
        finally:
            servers.close()
        return 2 if servers.cannot_work else stop.exit_code


def main(args: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="[polybeast_env] %(message)s")
    try:
        flags = tyro.cli(Flags, args=args)
        flags.validate()
        return run(flags)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
