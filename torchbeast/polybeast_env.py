"""PolyBeast's environments, for a learner in another process or on another machine.

    python -m torchbeast.polybeast_env --env Catch --num_servers 4
        server i listens at unix:/tmp/polybeast.<i>, and the learner dials
    python -m torchbeast.polybeast_env --env Catch --connect learner:4242
        the learner listens, and the environments dial in

Each server is a process (libtorchbeast/env_host.py), supervised until Ctrl-C or SIGTERM.
"""

import dataclasses
import logging
import random
import sys
import time
from dataclasses import dataclass

import tyro

from libtorchbeast import secret
from libtorchbeast.env_host import HostConfig
from libtorchbeast.helper_process import Helper
from libtorchbeast.rpc.address import server_address
from libtorchbeast.rpc.security import Security
from libtorchbeast.seeding import derive_seed
from libtorchbeast.supervisor import CANNOT_WORK, Child, Supervisor
from torchbeast.envs import GROUP_FACTORY, EnvOptions, check_env, look_at
from torchbeast.errors import UsageError
from torchbeast.run.signals import StopRequest

logger = logging.getLogger("torchbeast")

POLL_S = 0.2
STOP_S = 5.0


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
    """Environments of a process, in two groups: one steps while the agent looks at the other."""
    env_timeout_s: float = 120.0
    """A process whose environments take longer for one step is killed and restarted."""
    seed: int | None = None
    """Of the environments. None: another one at each start, and so on each machine."""

    @property
    def num_groups(self) -> int:
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
        check_env(self.env_options)
        try:
            for number in range(self.num_servers):
                address = self.address(number)
                check = self.check_listening if self.connect is None else self.check_dialing
                check(address)
        except ValueError as error:
            raise UsageError(str(error)) from error
        # Better one sentence here than ten there.
        look_at(self.env_options, self.envs_per_server // self.num_groups)


def server(flags: Flags, number: int, seed: int) -> Child:
    """One of the processes, to be supervised."""

    def start(num_starts: int) -> Helper:
        config = HostConfig(
            name=f"{flags.env} {number}",
            factory=GROUP_FACTORY,
            factory_options=dataclasses.asdict(flags.env_options),
            num_envs=flags.envs_per_server // flags.num_groups,
            num_groups=flags.num_groups,
            seed=derive_seed(seed, number, num_starts),
            address=flags.address(number),
            dial=flags.connect is not None,
            security=Security.of(flags).to_json(),
        )
        return Helper("libtorchbeast.env_host", config.to_json(), needs_token=True)

    return Child(f"Server {number}", start)


def run(flags: Flags) -> int:
    """Until asked to stop. Returns the exit code."""
    seed = random.SystemRandom().randrange(2**31) if flags.seed is None else flags.seed
    servers = Supervisor(
        [server(flags, number, seed) for number in range(flags.num_servers)],
        flags.env_timeout_s,
        timeout_flag="--env_timeout_s",
        max_failures=None,
        final_code=CANNOT_WORK,
    )

    def terminate() -> None:
        for process in servers.processes:
            assert isinstance(process, Helper)
            process.terminate()

    with StopRequest() as stop:
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
            servers.close(terminate, STOP_S)
        return 2 if servers.cannot_work else stop.exit_code


def main(args: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="[polybeast_env] %(message)s")
    secret.take()
    try:
        flags = tyro.cli(Flags, args=args)
        flags.validate()
        return run(flags)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
