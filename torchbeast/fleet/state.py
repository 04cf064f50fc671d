"""What is known of a fleet: what was started, how its tasks fare, and what launchers do with it.

No secret is in <savedir>/<name>/fleet.json, which keeps it between two commands.
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
    """How its launcher finds it again."""

    @classmethod
    def of(cls, flags: Flags) -> "State":
        """Of a fleet that starts now."""
        now = datetime.datetime.now().isoformat(" ", "seconds")
        assert flags.connect is not None
        return cls(flags.name, flags.launcher, flags.env, flags.connect, flags.num_servers,
                   flags.num_tasks, now)  # fmt: skip

    def write(self, folder: Path) -> None:
        """Whoever reads it sees a whole file."""
        beside = folder / f".{FILE}.{os.getpid()}"
        beside.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        beside.replace(folder / FILE)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.name}: {self.num_servers} servers of {self.env} for {self.connect}, launched "
            f"with {self.launcher} at {self.started}"
        )


class TaskStatus(NamedTuple):
    """One task, for people."""

    task: str
    state: str
    """running, or why not, in the scheduler's own words."""
    where: str = "-"
    servers: str = "-"
    restarts: str = "-"
    """Of its servers, since it runs there."""


class Launcher(Protocol):
    """A module with these functions. `state.handle` is its own."""

    def start(self, flags: Flags, state: State) -> int:
        """Start the fleet and write its state; returns the exit code."""

    def status(self, state: State, folder: Path) -> list[TaskStatus]:
        """Of all tasks; empty if there are none any more."""

    def stop(self, state: State, folder: Path) -> None:
        """End all tasks; returns when they are gone, or UsageError."""


def make_folder(folder: Path) -> None:
    """UsageError if nothing can be written there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it may not be written to")
    except OSError as error:
        raise UsageError(
            f"A fleet's state is kept in {folder}, got {error}; give another --savedir."
        ) from error


def read(folder: Path) -> State:
    """UsageError if there is no such fleet."""
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
    """Names."""
    return sorted(path.parent.name for path in savedir.expanduser().glob(f"*/{FILE}"))
