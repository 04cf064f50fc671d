"""PolyBeast's actors that carry the model: processes with environments and a copy of the model.

    python -m torchbeast.polybeast_actor --env Catch --connect learner:4242

They dial a learner that listens, fetch its weights in the background and send whole rollouts: for
links whose latency or bandwidth makes it slow to ask the learner for each action
(`polybeast_env --connect`). The learner says which model they build.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass

from libtorchbeast.env_host import HostConfig
from libtorchbeast.helper_process import Helper
from libtorchbeast.rpc.security import Security
from libtorchbeast.seeding import derive_seed
from libtorchbeast.supervisor import Child, Supervisor
from torchbeast.envs import GROUP_FACTORY, EnvOptions, check_env, look_at_game
from torchbeast.envs.pettingzoo import check_agents
from torchbeast.errors import UsageError, require_positive
from torchbeast.models import check_model
from torchbeast.polybeast_env import ActorOptions, keep_alive, new_seed, run_program
from torchbeast.run.flags import num_cores
from torchbeast.run.remote_actor import ActorConfig


@dataclass(frozen=True)
class Flags(EnvOptions, Security, ActorOptions):
    """Run environments and a copy of the model for a PolyBeast learner elsewhere."""

    connect: str = ""
    """The learner's address: host:port, or unix:/path."""
    num_actors: int = num_cores()
    """Actor processes."""
    envs_per_actor: int = 16
    """Environments in each process; they step together, with one forward pass."""
    env_timeout_s: float = 120.0
    """Seconds that one step may take before its process is killed and restarted."""
    seed: int | None = None
    """Random seed of environments and actions. None: a new one at each start, so that machines
    differ."""

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""
        require_positive(self, "num_actors", "envs_per_actor", "env_timeout_s")
        if not self.connect:
            raise UsageError(
                "--connect must be the address of a learner that listens, got none; give it as "
                "host:port."
            )
        if self.model is not None:
            check_model(self.model)
        check_env(self.env_options)
        try:
            self.check_dialing(self.connect)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def fit_games(self) -> "Flags":
        """Return these flags; UsageError if a group has too few places for the agents of a game."""
        _, num_agents = look_at_game(self.env_options)  # one error here, not one per process
        check_agents(num_agents, self.envs_per_actor)
        return self


def actor(flags: Flags, number: int, seed: int) -> Child:
    """The actor process with this number, for the supervisor."""

    def start(num_starts: int) -> Helper:
        host = HostConfig(
            name=f"{flags.env} actor {number}",
            factory=GROUP_FACTORY,
            factory_options=dataclasses.asdict(flags.env_options),
            num_envs=flags.envs_per_actor,
            num_groups=1,
            seed=derive_seed(seed, number, num_starts),
            address=flags.connect,
            dial=True,
            is_first_start=num_starts == 0,
            security=Security.of(flags).to_json(),
        )
        config = ActorConfig(
            host=host.to_json(),
            model=flags.model,
            autocast=flags.autocast == "bf16",
            weights_dtype="bfloat16" if flags.weights_dtype == "bf16" else "float32",
        )
        return Helper("torchbeast.run.remote_actor", config.to_json(), needs_token=True)

    return Child(f"Actor {number}", start)


def run(flags: Flags, goes_on: Callable[[Supervisor], bool] = lambda actors: True) -> int:
    """Run actors until a stop signal, or until `goes_on`, called a few times a second, is false.

    Returns the exit code.
    """
    seed = new_seed() if flags.seed is None else flags.seed
    actors = [actor(flags, number, seed) for number in range(flags.num_actors)]
    about = (
        f"{flags.num_actors} actors of {flags.envs_per_actor} environments, dialing {flags.connect}"
    )
    return keep_alive(actors, flags.env_timeout_s, about, goes_on)


def main(args: list[str] | None = None) -> int:
    return run_program("polybeast_actor", Flags, run, args)


if __name__ == "__main__":
    sys.exit(main())
