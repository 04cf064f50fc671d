"""The flags of a fleet: what its processes run, and where."""

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from libtorchbeast import secret
from torchbeast import polybeast_env
from torchbeast.errors import UsageError, require_positive

DEFAULT_SAVEDIR = Path("~/.cache/torchbeast/fleets")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PLACED = ("servers_per_task", "cpus_per_server", "memory_gb_per_server")  # not for `local`
ACTORS_ALONE = [field.name for field in dataclasses.fields(polybeast_env.ActorOptions)]


@dataclass(frozen=True)
class TaskFlags(polybeast_env.Flags, polybeast_env.ActorOptions):
    """What the processes of a task run. The flags contain no secret."""

    role: Literal["environments", "actors"] = "environments"
    """What the servers run: environments (`polybeast_env`), or actors that carry the model
    (`polybeast_actor`), for slow links."""

    @property
    def num_groups(self) -> int:
        """An actor's environments all step together."""
        return 1 if self.role == "actors" else super().num_groups


@dataclass(frozen=True)
class Flags(TaskFlags):
    """Start a fleet of environment processes that dial a learner."""

    launcher: Literal["local", "ray", "slurm"] = "local"
    """What places the processes: this program on this machine, a Ray cluster, or Slurm."""
    name: str = "fleet"
    """The fleet's name, for the commands status and stop."""
    savedir: Path = DEFAULT_SAVEDIR
    """The fleet's state is kept in <savedir>/<name>; Slurm's nodes must see this folder, too."""
    servers_per_task: int = 1
    """Ray, Slurm: servers that are placed together, in one Ray actor or one task of the array."""
    cpus_per_server: float = 1.0
    """Ray, Slurm: CPU cores to request for each server."""
    memory_gb_per_server: float | None = None
    """Ray, Slurm: GiB of memory to request for each server; None: the scheduler's default."""

    ray_address: str = "auto"
    """Ray: the cluster; auto is the one that this machine belongs to."""
    ray_placement: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """Ray: spread tasks over all nodes, or fill one after the other."""
    ray_resources: str = ""
    """Ray: other resources to request for each task, as JSON: '{"simulators": 1}'."""
    ray_runtime_env: str = ""
    """Ray: its runtime_env, as JSON: '{"working_dir": "."}' copies your code to all nodes."""

    slurm_partition: str | None = None
    """Slurm: the partition; None: the cluster's default."""
    slurm_time_min: int = 1440
    """Slurm: time limit of a task in minutes; before it, the task is requeued."""
    slurm_options: str = ""
    """Slurm: more options of sbatch, as JSON: '{"account": "lab", "qos": "preemptible"}'."""

    pipes_basename: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = ""

    @property
    def folder(self) -> Path:
        """The folder of this fleet's files."""
        return self.savedir.expanduser().absolute() / self.name

    @property
    def num_tasks(self) -> int:
        """Tasks of the fleet: one with the local launcher, which supervises all servers."""
        if self.launcher == "local":
            return 1
        return math.ceil(self.num_servers / self.servers_per_task)

    @property
    def cpus_per_task(self) -> float:
        return self.cpus_per_server * min(self.servers_per_task, self.num_servers)

    @property
    def memory_gb_per_task(self) -> float | None:
        if self.memory_gb_per_server is None:
            return None
        return self.memory_gb_per_server * min(self.servers_per_task, self.num_servers)

    def read_json(self, name: str) -> dict[str, Any]:
        """The value of a flag that takes a JSON object."""
        text = getattr(self, name)
        try:
            value = json.loads(text or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UsageError(f"--{name} must be a JSON object, got {text}.")
        return value

    def validate(self) -> None:
        """Raise UsageError with one sentence if the flags cannot work."""
        check_name(self.name)
        if self.connect is None:
            raise UsageError(
                "A fleet dials a learner that listens; give its address, --connect host:port."
            )
        require_positive(self, *PLACED, "slurm_time_min")
        self._check_launcher()
        for name in ("ray_resources", "ray_runtime_env", "slurm_options"):
            self.read_json(name)
        super().validate()
        self.fit_games()
        if self.launcher == "slurm" and self.token_file is None and secret.token():
            raise UsageError(
                f"Slurm's nodes read the token from a file, got the variable {secret.VARIABLE}; "
                "give --token_file, in a folder that all nodes see."
            )

    def _check_launcher(self) -> None:
        """UsageError for flags of other launchers or roles, which would have no effect."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) == field.default:
                continue
            for launcher in ("ray", "slurm"):
                if field.name.startswith(f"{launcher}_") and self.launcher != launcher:
                    raise UsageError(
                        f"--{field.name} is for --launcher {launcher}, got {self.launcher}; "
                        "leave it out."
                    )
            if field.name in ACTORS_ALONE and self.role != "actors":
                raise UsageError(f"--{field.name} is for --role actors, got {self.role}.")
            if field.name in PLACED and self.launcher == "local":
                raise UsageError(
                    f"--{field.name} is for --launcher ray and slurm, got local; leave it out."
                )


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"A fleet's name has at most 64 letters, digits, dots, - and _, got {name!r}."
        )
