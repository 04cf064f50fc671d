"""Learning curves of runs: python -m torchbeast.report.plot --runs DIR [DIR ...] --out curve.png"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchbeast.errors import UsageError

MINUTE_S = 60.0


@dataclass(frozen=True)
class Options:
    """Draw the mean return of one or more runs over steps and over time."""

    runs: tuple[Path, ...]
    """Folders of runs, with a logs.csv each."""
    out: Path = Path("curve.png")
    """The picture to write."""
    title: str = ""
    """What stands above it."""


def read_curve(run: Path) -> dict[str, list[float]]:
    """Steps, minutes and mean returns of one run. Pauses between resumes do not count as time.

    UsageError if there is nothing to draw.
    """
    path = run.expanduser() / "logs.csv"
    if not path.exists():
        raise UsageError(f"{run} is no run: it has no logs.csv; give folders of <savedir>/<xpid>.")
    steps, minutes, returns = [], [], []
    elapsed = last_time = 0.0
    last_interval = 0.0
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            now = float(row["_time"])
            interval = now - last_time if last_time else 0.0
            if last_interval and interval > 10 * last_interval + MINUTE_S:
                interval = last_interval
            elapsed, last_time, last_interval = elapsed + interval, now, interval
            if row.get("mean_episode_return"):
                steps.append(float(row["step"]))
                minutes.append(elapsed / MINUTE_S)
                returns.append(float(row["mean_episode_return"]))
    if not steps:
        raise UsageError(f"{run} has no finished episode yet; there is nothing to draw.")
    return {"steps": steps, "minutes": minutes, "returns": returns}


def draw(options: Options) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UsageError(
            "Curves are drawn by matplotlib, which is missing here: pip install matplotlib."
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [read_curve(run) for run in options.runs]
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for run, curve in zip(options.runs, curves, strict=True):
        by_step.plot([step / 1e6 for step in curve["steps"]], curve["returns"], label=run.name)
        by_time.plot(curve["minutes"], curve["returns"], label=run.name)
    by_step.set_xlabel("environment steps, millions")
    by_time.set_xlabel("minutes")
    by_step.set_ylabel("mean_episode_return (of the last 100)")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    if len(options.runs) > 1:
        by_step.legend()
    if options.title:
        figure.suptitle(options.title)
    figure.tight_layout()
    try:
        figure.savefig(options.out, dpi=110)
    except (OSError, ValueError) as error:  # or a kind of file that is not known
        raise UsageError(f"{options.out} cannot be written: {error}") from error


def main() -> int:
    try:
        draw(tyro.cli(Options))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
