"""PolyBeast on one machine: the learner, and environments in worker processes beside it."""

import sys
from dataclasses import dataclass
from typing import Any

from libtorchbeast import output_log
from torchbeast import polybeast_learner
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.errors import require_positive
from torchbeast.report import log_to_terminal
from torchbeast.run.command_line import run_command_line
from torchbeast.run.env_sources import BothEnvironments, LocalEnvironments, Source
from torchbeast.run.flags import num_cores
from torchbeast.run.signals import StopRequest

GROUPS_PER_WORKER = 2  # one steps while the agent chooses actions for the other


@dataclass(frozen=True)
class Flags(polybeast_learner.Flags):
    """Train or test an agent with environments on this machine."""

    num_servers: int = num_cores() + 1
    """Worker processes that step environments. Default: one more than there are cores, so that no
    core is idle; with --num_passes above 1, one for each core."""
    num_actors: int | None = None
    """Groups of environments, distributed over the workers; None: two for each worker."""
    envs_per_actor: int = 8 if num_cores() <= 8 else 4
    """E: environments in a group, which step together."""
    pipes_basename: str = "unix:/tmp/polybeast"
    """Not used here: environments on this machine use shared memory."""

    @property
    def num_groups(self) -> int:
        return self.num_actors or GROUPS_PER_WORKER * self.num_servers

    def place_environments(self) -> dict[str, Any]:
        is_given = self.is_given("num_actors") or self.is_given("num_servers")
        if not self.hold_actors:  # a learner with several passes keeps a core busy by itself
            return {"num_servers": num_cores()} if self.num_passes > 1 and not is_given else {}
        # With one environment for each rollout of a batch, policy lag is 0.
        if is_given:
            return {"envs_per_actor": max(1, self.batch_size // max(1, self.num_groups))}
        num_groups = max(1, self.batch_size // self.envs_per_actor)
        num_servers = min(num_groups, max(num_groups // GROUPS_PER_WORKER, num_cores()))
        return {"num_actors": num_groups, "num_servers": num_servers}

    @property
    def default_servers(self) -> list[str]:
        return []

    def validate(self) -> None:
        super().validate()
        require_positive(self, "num_servers", "num_groups", "envs_per_actor")


def open_source(flags: Flags, stop: StopRequest, ranks: Ranks = ALONE) -> Source:
    """The run's environments: workers, and the connections that the flags ask for."""
    local = LocalEnvironments(
        flags.env_options,
        num_workers=min(flags.num_servers, flags.num_groups),
        num_groups=flags.num_groups,
        envs_per_group=flags.envs_per_actor,
        env_timeout_s=flags.env_timeout_s,
        output_path=flags.rundir / output_log.FILE_NAME,
    )
    if not flags.listen_at and not flags.dial:
        return local
    return BothEnvironments([local, polybeast_learner.open_source(flags, stop, ranks)])


def train(flags: Flags, stop: StopRequest | None = None) -> int:
    """Train until `total_steps`, or until asked to stop. Returns the exit code."""
    return polybeast_learner.train(flags, stop, open_source)


def main(flags: Flags) -> int:
    log_to_terminal()
    return train(flags) if flags.mode == "train" else polybeast_learner.test(flags)


if __name__ == "__main__":
    sys.exit(run_command_line(Flags, main))
