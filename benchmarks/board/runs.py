"""Kept runs: one small CSV file each, whose first line says how it was made."""

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from board.tasks import OURS, TASKS


class Point(NamedTuple):
    """A point of a learning curve."""

    seconds: float
    steps: float
    mean_return: float


@dataclass(frozen=True)
class Run:
    """A kept run: how it was made, and its learning curve."""

    task: str
    system: str
    seed: int
    minutes: float
    cpu_s: float
    command: str
    machine: str
    versions: str
    curve: tuple[Point, ...] = ()

    @staticmethod
    def path(results: Path, task: str, system: str, seed: int) -> Path:
        return results / task / f"{system}-{seed}.csv"

    def save(self, results: Path) -> None:
        """Write the run's file, as a whole or not at all."""
        path = self.path(results, self.task, self.system, self.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {name: value for name, value in asdict(self).items() if name != "curve"}
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("w", newline="") as file:
                file.write(f"# {json.dumps(about)}\n")
                writer = csv.writer(file)
                writer.writerow(Point._fields)
                for p in self.curve:
                    writer.writerow((round(p.seconds, 1), int(p.steps), round(p.mean_return, 3)))
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Run":
        with path.open(newline="") as file:
            about = json.loads(file.readline().removeprefix("# "))
            rows = csv.DictReader(file)
            curve = tuple(Point(*(float(row[name]) for name in Point._fields)) for row in rows)
        return cls(**about, curve=curve)

    def return_at(self, minutes: float) -> float | None:
        """The mean return after so many minutes; None if the run was shorter or had no episode."""
        if minutes > self.minutes + 0.01:
            return None
        until = [p.mean_return for p in self.curve if p.seconds <= 60 * minutes]
        return until[-1] if until else None

    def return_after(self, steps: float) -> float | None:
        """The mean return after so many steps; None if the run made fewer or had no episode."""
        until = [p.mean_return for p in self.curve if p.steps <= steps]
        return until[-1] if until and self.num_steps >= 0.99 * steps else None

    def first_above(self, threshold: float) -> Point | None:
        return next((p for p in self.curve if p.mean_return >= threshold), None)

    @property
    def num_steps(self) -> float:
        return self.curve[-1].steps if self.curve else 0


def thin_out(points: Iterable[Point], seconds: float) -> tuple[Point, ...]:
    """The first point of each period of so many seconds, and the last point."""
    kept: list[Point] = []
    last = None
    for last in points:
        if not kept or last.seconds >= kept[-1].seconds + seconds:
            kept.append(last)
    if last is not None and last is not kept[-1]:
        kept.append(last)
    return tuple(kept)


def load_all(results: Path) -> dict[str, dict[str, list[Run]]]:
    """All kept runs by task, in the order of TASKS, and by system, ours first."""
    found: dict[str, dict[str, list[Run]]] = {}
    for task in TASKS:
        systems: dict[str, list[Run]] = {}
        for path in sorted((results / task).glob("*.csv")):
            run = Run.load(path)
            systems.setdefault(run.system, []).append(run)
        if systems:
            ours_first = sorted(systems.items(), key=lambda item: (item[0] != OURS, item[0]))
            found[task] = dict(ours_first)
    return found
