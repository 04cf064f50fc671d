"""Workers: hosts on this machine, each with lanes of the learner's process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast.env_host import HostConfig
from libtorchbeast.helper_process import Helper
from libtorchbeast.output_log import OutputLog
from libtorchbeast.rows import Spec
from libtorchbeast.seeding import derive_seed
from libtorchbeast.shared_lanes import DESCRIPTORS_PER_LANE, Lane, allow_descriptors
from libtorchbeast.supervisor import Child, Supervisor

JOIN_S = 10.0  # how long to wait for workers whose lanes were closed


@dataclass(frozen=True)
class WorkersConfig:
    """The configuration of the workers, which share `num_groups` groups of environments."""

    factory: str
    """`package.module:function` that makes a group of environments (see HostConfig)."""
    factory_options: dict[str, Any]
    spec: Spec
    num_workers: int
    num_groups: int
    envs_per_group: int
    seed: int
    env_timeout_s: float = 120.0
    """A worker without a heartbeat for so long is killed and restarted."""
    factory_data: bytes = b""
    """Bytes for the factory, such as a pickled function, which JSON options cannot hold."""
    output_path: Path | None = None
    """The file for what environments print; None: they print to this process's stdout."""


class Workers:
    """The learner's side of its workers. No process is started before `poll`."""

    def __init__(self, config: WorkersConfig) -> None:
        self._config = config
        allow_descriptors(DESCRIPTORS_PER_LANE * config.num_groups + 4 * config.num_workers)
        self.lanes = [
            Lane.create(config.spec, config.envs_per_group) for _ in range(config.num_groups)
        ]
        path = config.output_path
        self.supervisor = Supervisor(
            [self._child(i) for i in range(config.num_workers)],
            config.env_timeout_s,
            timeout_flag="--env_timeout_s",
            keep_output=None if path is None else OutputLog(path).keep,
        )

    def poll(self) -> None:
        """Start and restart workers; see `Supervisor.poll`."""
        self.supervisor.poll()

    def close(self) -> None:
        """End all workers: close their lanes, wait, then kill."""

        def close_lanes() -> None:
            for lane in self.lanes:
                lane.turn.close()

        self.supervisor.close(close_lanes, JOIN_S)
        for lane in self.lanes:
            lane.release()

    def _child(self, number: int) -> Child:
        config = self._config
        lanes = self.lanes[number :: config.num_workers]

        def start(num_starts: int) -> Helper:
            host = HostConfig(
                name=f"worker {number}",
                factory=config.factory,
                factory_options=config.factory_options,
                num_envs=config.envs_per_group,
                num_groups=len(lanes),
                seed=derive_seed(config.seed, number, num_starts),
                lane_fds=[lane.fd for lane in lanes],
                spec=config.spec.to_json(),
            )
            return Helper(
                "libtorchbeast.env_host",
                host.to_json(),
                host.lane_fds,
                catch_output=config.output_path is not None,
                data=config.factory_data,
            )

        def abandon() -> None:
            for lane in lanes:
                lane.turn.abandon()

        def num_passes() -> int:
            return sum(lane.num_passes for lane in lanes) // len(lanes)

        return Child(f"Worker {number}", start, abandon, num_passes)
