"""PolyBeast's environments, for a learner in another process or on another machine.

    python -m torchbeast.polybeast_env --env Catch --num_servers 4
        server i listens at unix:/tmp/polybeast.<i>, and the learner dials
    python -m torchbeast.polybeast_env --env Catch --connect learner:4242
        the learner listens, and the environments dial in

Each server is a process (libtorchbeast/env_host.py), supervised until Ctrl-C or SIGTERM. It waits
for a learner without a time limit. The program gives up only if no environment has ever worked.
"""

import dataclasses
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import tyro

from libtorchbeast import secret
from libtorchbeast.env_host import HostConfig
from libtorchbeast.helper_process import Helper
from libtorchbeast.rpc.address import server_address
from libtorchbeast.rpc.security import Security
from libtorchbeast.seeding import derive_seed
from libtorchbeast.supervisor import CANNOT_WORK, NEVER_WORKED, Child, NobodyLeft, Supervisor
from torchbeast.envs import GROUP_FACTORY, EnvOptions, check_env, look_at_game
from torchbeast.envs.pettingzoo import check_agents
from torchbeast.errors import UsageError, require_positive
from torchbeast.run.signals import StopRequest

logger = logging.getLogger("torchbeast")

ENVS_PER_SERVER = 16
POLL_S = 0.2
STOP_S = 5.0


class ClientFlags(Protocol):
    """The flags of a program for `run_program`: environments for a learner elsewhere."""

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""

    def fit_games(self) -> Any:
        """Return the flags with groups that have places for all agents of a game, or UsageError."""


FlagsT = TypeVar("FlagsT", bound=ClientFlags)


@dataclass(frozen=True)
class ActorOptions:
    """Flags of actors that carry the model; see polybeast_actor.py."""

    model: str | None = None
    """package.module:Class of a model of your own: an actor imports the class that the learner
    names only if it is named here, too."""
    weights_dtype: Literal["float32", "bf16"] = "float32"
    """Precision in which weights are sent to actors: bf16 takes half of the bytes."""
    autocast: Literal["none", "bf16"] = "none"
    """Precision of the actors' forward pass: bf16 uses bfloat16 where that is safe, and V-trace
    corrects for the difference."""


@dataclass(frozen=True)
class Flags(EnvOptions, Security):
    """Run environments for a PolyBeast learner elsewhere."""

    pipes_basename: str = "unix:/tmp/polybeast"
    """Server i listens at <pipes_basename>.<i>; with host:port, at port + i."""
    connect: str | None = None
    """Dial the learner that listens at this address, instead of listening."""
    num_servers: int = 4
    """Server processes."""
    envs_per_server: int | None = None
    """Environments in each process, in two groups: one steps while the agent chooses actions for
    the other. None: 16, or the agents of two games if these are more."""
    env_timeout_s: float = 120.0
    """Seconds that one step may take before its process is killed and restarted."""
    seed: int | None = None
    """Random seed of the environments. None: a new one at each start, so that machines differ."""

    @property
    def num_envs(self) -> int:
        """Environments in each server."""
        return ENVS_PER_SERVER if self.envs_per_server is None else self.envs_per_server

    @property
    def num_groups(self) -> int:
        """Groups in each server: two, or one if its number of environments is odd."""
        return 2 if self.num_envs % 2 == 0 else 1

    def address(self, number: int) -> str:
        """The address at which server `number` listens, or that it dials."""
        if self.connect is not None:
            return self.connect
        return server_address(self.pipes_basename, number)

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""
        require_positive(self, "num_servers", "envs_per_server", "env_timeout_s")
        check_env(self.env_options)
        try:
            for number in range(self.num_servers):
                address = self.address(number)
                check = self.check_listening if self.connect is None else self.check_dialing
                check(address)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def fit_games(self) -> "Flags":
        """The flags with groups that have places for all agents of a game, or UsageError."""
        _, num_agents = look_at_game(self.env_options)  # one error here, not one per process
        flags = self
        if self.envs_per_server is None and num_agents > self.num_envs // self.num_groups:
            flags = dataclasses.replace(self, envs_per_server=2 * num_agents)
            logger.info("A game has %d agents: a server has %d environments, two games.",
                        num_agents, flags.num_envs)  # fmt: skip
        check_agents(num_agents, flags.num_envs // flags.num_groups)
        return flags


def server(flags: Flags, number: int, seed: int) -> Child:
    """The server process with this number, for the supervisor."""

    def start(num_starts: int) -> Helper:
        config = HostConfig(
            name=f"{flags.env} {number}",
            factory=GROUP_FACTORY,
            factory_options=dataclasses.asdict(flags.env_options),
            num_envs=flags.num_envs // flags.num_groups,
            num_groups=flags.num_groups,
            seed=derive_seed(seed, number, num_starts),
            address=flags.address(number),
            dial=flags.connect is not None,
            is_first_start=num_starts == 0,
            security=Security.of(flags).to_json(),
        )
        return Helper("libtorchbeast.env_host", config.to_json(), needs_token=True)

    return Child(f"Server {number}", start)


def run(flags: Flags, goes_on: Callable[[Supervisor], bool] = lambda servers: True) -> int:
    """Run servers until a stop signal, or until `goes_on`, called a few times a second, is false.

    Returns the exit code.
    """
    seed = new_seed() if flags.seed is None else flags.seed
    servers = [server(flags, number, seed) for number in range(flags.num_servers)]
    where = f"dialing {flags.connect}" if flags.connect else f"listening at {flags.address(0)} ..."
    about = f"{flags.num_servers} servers of {flags.num_envs} environments, {where}"
    return keep_alive(servers, flags.env_timeout_s, about, goes_on)


def new_seed() -> int:
    """A random seed, so that starts and machines differ."""
    return random.SystemRandom().randrange(2**31)


def keep_alive(
    children: list[Child],
    env_timeout_s: float,
    about: str,
    goes_on: Callable[[Supervisor], bool] = lambda servers: True,
) -> int:
    """Supervise processes until a stop signal, or `goes_on` is false; returns the exit code."""
    servers = Supervisor(
        children,
        env_timeout_s,
        timeout_flag="--env_timeout_s",
        max_failures=None,
        final_code=CANNOT_WORK,
        false_start_code=NEVER_WORKED,
    )

    def terminate() -> None:
        for process in servers.processes:
            assert isinstance(process, Helper)
            process.terminate()

    with StopRequest() as stop:
        logger.info("%s", about)
        try:
            while stop.signal is None and not servers.cannot_work:
                servers.poll()
                if not goes_on(servers):
                    break
                time.sleep(POLL_S)
        finally:
            servers.close(terminate, STOP_S)
        return 2 if servers.cannot_work else stop.exit_code


def run_program(
    name: str, flags_class: type[FlagsT], run: Callable[[FlagsT], int], args: list[str] | None
) -> int:
    """Parse the command line and call `run`; returns the exit code (2 for a user's mistake)."""
    logging.basicConfig(level=logging.INFO, format=f"[{name}] %(message)s")
    secret.take()
    try:
        flags = tyro.cli(flags_class, args=args, use_underscores=True)
        flags.validate()
        return run(flags.fit_games())
    except (UsageError, NobodyLeft) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def main(args: list[str] | None = None) -> int:
    return run_program("polybeast_env", Flags, run, args)


if __name__ == "__main__":
    sys.exit(main())
