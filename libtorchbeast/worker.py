"""A worker: a process that steps groups of environments, each group in a lane of its own.

Started by `Workers` (workers.py) as `python -m libtorchbeast.worker CONFIG`. While the agent looks
at one group's rows, the worker steps the next group. It imports no torch.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from libtorchbeast.environments import Environments, make_environments
from libtorchbeast.lanes import Lane, LaneClosed
from libtorchbeast.specs import Spec

LOOK_AROUND_S = 0.25  # how soon a worker that waits sees that its parent is gone
HEALTHY_STEPS = 20  # after so many, a failure is bad luck: the environments are made anew at once
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class GroupConfig:
    """One group of environments: where it writes, and the seed of its first environment."""

    fd: int
    num_envs: int
    seed: int


@dataclass(frozen=True)
class WorkerConfig:
    """All that a worker needs to know; goes to it as JSON."""

    factory: str
    """`package.module:function`, called with num_envs, seed and `factory_options`."""
    factory_options: dict[str, Any]
    spec: Any
    groups: list[GroupConfig]
    report_fd: int
    parent: int

    @classmethod
    def from_json(cls, text: str) -> "WorkerConfig":
        values = json.loads(text)
        values["groups"] = [GroupConfig(**group) for group in values["groups"]]
        return cls(**values)


class Group:
    """Environments and their lane."""

    def __init__(self, config: WorkerConfig, group: GroupConfig) -> None:
        self._config = config
        self._group = group
        self._lane = Lane(group.fd, Spec.from_json(config.spec), group.num_envs)
        self._num_steps = 0
        self._num_builds = 0
        self._envs = self._build()
        self._lane.look_around()  # that took its time, and the next group's will, too

    def start(self) -> None:
        """Show the agent the first rows."""
        row = self._envs.reset()
        while True:
            try:
                self._lane.attach(LOOK_AROUND_S)
                break
            except TimeoutError:
                self._look_around()
        self._lane.write(row)
        self._lane.send_rows()

    def step(self) -> None:
        """Take the agent's actions and show it what came of them."""
        while not self._lane.wait_for_actions(LOOK_AROUND_S):
            self._look_around()
        try:
            row = self._envs.step(self._lane.actions)
            self._num_steps += 1
        except Exception:
            if self._num_steps < HEALTHY_STEPS:
                raise
            report(self._config, traceback.format_exc())
            row = self._start_anew()
        self._lane.write(row)
        self._lane.send_rows()

    def close(self) -> None:
        self._envs.close()

    def _look_around(self) -> None:
        exit_if_orphaned(self._config.parent)
        self._lane.look_around()

    def _start_anew(self) -> dict[str, Any]:
        """The first rows of new environments: the transition into them did not happen."""
        try:
            self._envs.close()
        except Exception:
            report(self._config, traceback.format_exc())
        self._envs = self._build()
        row = self._envs.reset()
        row["truncated"] = np.ones_like(row["truncated"])
        return row

    def _build(self) -> Environments:
        # New seeds each time, or the same bad luck would come again.
        seed = self._group.seed + 1_000_003 * self._num_builds
        self._num_builds += 1
        self._num_steps = 0
        config = self._config
        return make_environments(
            config.factory, self._group.num_envs, seed % 2**31, **config.factory_options
        )


def report(config: WorkerConfig, text: str) -> None:
    """Tell the parent what went wrong; it is the one who shows it."""
    try:
        os.write(config.report_fd, json.dumps(text).encode() + b"\n")
    except OSError:
        exit_if_orphaned(config.parent)


def exit_if_orphaned(parent: int) -> None:
    if os.getppid() != parent:
        os._exit(1)


def set_up_process(parent: int) -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    exit_if_orphaned(parent)


def main(text: str) -> NoReturn:
    config = WorkerConfig.from_json(text)
    set_up_process(config.parent)
    try:
        groups = [Group(config, group) for group in config.groups]
        try:
            for group in groups:
                group.start()
            while True:
                for group in groups:
                    group.step()
        except LaneClosed:
            for group in groups:
                group.close()
    except Exception:
        report(config, traceback.format_exc())
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
