"""A fleet's state, the status of its tasks, and the interface of the launchers.

The state is kept in <savedir>/<name>/fleet.json between two commands; it contains no secret.
"""

import dataclasses
import datetime
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchbeast.errors import UsageError
from torchbeast.fleet.flags import Flags

FILE = "fleet.json"


@dataclass
class State:
    """A fleet, as it was started."""

    name: str
    launcher: str
    env: str
    connect: str
    num_servers: int
    num_tasks: int
    started: str
    is_stopped: bool = False
    handle: dict[str, Any] = field(default_factory=dict)
    """What its launcher needs to find it again."""

    @classmethod
    def of(cls, flags: Flags) -> "State":
        """The state of a fleet that starts now."""
        now = datetime.datetime.now().isoformat(" ", "seconds")
        assert flags.connect is not None
        return cls(flags.name, flags.launcher, flags.env, flags.connect, flags.num_servers,
                   flags.num_tasks, now)  # fmt: skip

    def write(self, folder: Path) -> None:
        """Write the state file atomically."""
        beside = folder / f".{FILE}.{os.getpid()}"
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        beside.replace(folder / FILE)

    def describe(self) -> str:
        """The fleet in one line."""
        return (
            f"{self.name}: {self.num_servers} servers of {self.env} for {self.connect}, launched "
            f"with {self.launcher} at {self.started}"
        )


class TaskStatus(NamedTuple):
    """The status of one task, as it is shown to users."""

    task: str
    state: str
    """running, or why not, in the scheduler's own words."""
    where: str = "-"
    servers: str = "-"
    restarts: str = "-"
    """Restarts of its servers, since it has been running there."""


class Launcher(Protocol):
    """The functions that a launcher's module has. `state.handle` is for its own use."""

    def start(self, flags: Flags, state: State) -> int:
        """Start the fleet and write its state; returns the exit code."""

    def status(self, state: State, folder: Path) -> list[TaskStatus]:
        """The status of all tasks; empty if there are none any more."""

    def stop(self, state: State, folder: Path) -> None:
        """End all tasks and wait until they are gone; UsageError if they do not end."""


def make_folder(folder: Path) -> None:
    """Make a fleet's folder; UsageError if nothing can be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise UsageError(
            f"A fleet's state is kept in {folder}, got {error}; give another --savedir."
        ) from error


def read(folder: Path) -> State:
    """Read a fleet's state; UsageError if there is no such fleet."""
    try:
        return State(**json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        names = ", ".join(fleets_in(folder.parent)) or "none"
        raise UsageError(
            f"There must be a fleet named {folder.name} in {folder.parent}, got {names}; "
            "give its --name, and the --savedir that it was started with."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{folder / FILE} must be the file that a fleet's start has written, got {error}."
        ) from error


def fleets_in(savedir: Path) -> list[str]:
    """The names of the fleets in `savedir`."""
    return sorted(path.parent.name for path in savedir.expanduser().glob(f"*/{FILE}"))
