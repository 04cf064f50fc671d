"""A task: a share of a fleet's servers, which a scheduler places on one machine.

split      makes the flags of all tasks
run_task   runs one task, in the process that the scheduler started
"""

import dataclasses
import logging
from collections.abc import Callable

from libtorchbeast.rpc.security import Security
from libtorchbeast.seeding import derive_seed
from libtorchbeast.supervisor import Supervisor
from torchbeast import polybeast_env
from torchbeast.fleet.flags import Flags, TaskFlags

LOG_FORMAT = "[fleet] %(message)s"


def split(flags: Flags) -> list[TaskFlags]:
    """The flags of each task: its share of the servers, and its seed."""
    names = [field.name for field in dataclasses.fields(TaskFlags)]
    everything = TaskFlags(**{name: getattr(flags, name) for name in names})
    paths = Security.of(flags).to_json()  # absolute: tasks run in other folders
    most = flags.num_servers if flags.launcher == "local" else flags.servers_per_task
    shares = []
    for number in range(flags.num_tasks):
        num_servers = min(most, flags.num_servers - number * most)
        seed = None if flags.seed is None else derive_seed(flags.seed, number)
        share = dataclasses.replace(everything, num_servers=num_servers, seed=seed)
        shares.append(dataclasses.replace(share, **paths))
    return shares


def log_to_stderr() -> None:
    """Show this package's log messages on stderr, but not those of a scheduler's library."""
    logger = logging.getLogger("torchbeast")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def run_task(flags: TaskFlags, is_restart: bool, goes_on: Callable[[Supervisor], bool]) -> int:
    """Run the task's servers until SIGTERM, or until `goes_on` is false. Returns the exit code.

    A restart has other seeds, so that episodes differ. UsageError if this machine lacks something
    that the flags need, NobodyLeft if no environment has ever worked.
    """
    flags = dataclasses.replace(flags, seed=None) if is_restart else flags
    if flags.role == "actors":
        return _run_actors(flags, goes_on)
    flags.validate()
    return polybeast_env.run(flags.fit_games(), goes_on)


def _run_actors(flags: TaskFlags, goes_on: Callable[[Supervisor], bool]) -> int:
    from torchbeast import polybeast_actor  # which needs torch

    flags.validate()
    num_envs = flags.fit_games().num_envs
    known = {field.name for field in dataclasses.fields(polybeast_actor.Flags)}
    shared = {name: value for name, value in vars(flags).items() if name in known}
    actors = polybeast_actor.Flags(**shared, num_actors=flags.num_servers, envs_per_actor=num_envs)
    actors.validate()
    return polybeast_actor.run(actors.fit_games(), goes_on)
