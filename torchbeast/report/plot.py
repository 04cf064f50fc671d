"""Learning curves of runs: python -m torchbeast.report.plot --runs DIR [DIR ...] --out curve.png"""

import csv
from dataclasses import dataclass
from pathlib import Path

import tyro

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
    """Steps, minutes and mean returns of one run. Pauses between resumes do not count as time."""
    steps, minutes, returns = [], [], []
    elapsed = last_time = 0.0
    last_interval = 0.0
    with (run / "logs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            now = float(row["_time"])
            interval = now - last_time if last_time else 0.0
            if last_interval and interval > 10 * last_interval + MINUTE_S:
                interval = last_interval
            elapsed, last_time, last_interval = elapsed + interval, now, interval
            if row["mean_episode_return"]:
                steps.append(float(row["step"]))
                minutes.append(elapsed / MINUTE_S)
                returns.append(float(row["mean_episode_return"]))
    return {"steps": steps, "minutes": minutes, "returns": returns}


def draw(options: Options) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SystemExit(
            "Curves are drawn by matplotlib, which is missing here: pip install matplotlib."
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for run in options.runs:
        curve = read_curve(run)
        by_step.plot([step / 1e6 for step in curve["steps"]], curve["returns"], label=run.name)
        by_time.plot(curve["minutes"], curve["returns"], label=run.name)
    by_step.set_xlabel("environment steps, millions")
    by_time.set_xlabel("minutes")
    by_step.set_ylabel("mean return, last 100 episodes")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
    if len(options.runs) > 1:
        by_step.legend()
    if options.title:
        figure.suptitle(options.title)
    figure.tight_layout()
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    draw(tyro.cli(Options))
