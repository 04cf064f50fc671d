"""What the commands want of a launcher, and how a task is shown."""

from pathlib import Path
from typing import NamedTuple, Protocol

from torchbeast.fleet.flags import Flags
from torchbeast.fleet.state import State


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


def table(tasks: list[TaskStatus]) -> str:
    rows = [TaskStatus._fields, *tasks]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
             for row in rows]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)
