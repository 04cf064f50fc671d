"""Learning curves of runs: python -m torchbeast.report.plot --runs DIR [DIR ...] --out curve.png

`--figure` draws another figure than the mean return: `eval_return`, `info/is_success`, ...
"""

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchbeast.errors import UsageError

MINUTE_S = 60.0
RETURN = "mean_episode_return"
BESIDES = ("_tick", "_time", "step")  # columns of logs.csv that cannot be drawn


@dataclass(frozen=True)
class Options:
    """Draw the mean return of one or more runs, or another figure, over steps and over time."""

    runs: tuple[Path, ...]
    """Folders of runs, with a logs.csv each."""
    out: Path = Path("curve.png")
    """The picture to write."""
    figure: str = RETURN
    """What to draw: a column of logs.csv, as docs/runs.md lists them."""
    title: str = ""
    """A title above the plots."""


def read_curve(run: Path, figure: str = RETURN) -> dict[str, list[float]]:
    """Steps, minutes and values of one run. Pauses between resumes do not count as time.

    UsageError if there is nothing to draw.
    """
    path = run.expanduser() / "logs.csv"
    if not path.exists():
        raise UsageError(f"{run} is no run: it has no logs.csv; give folders of <savedir>/<xpid>.")
    steps, minutes, values = [], [], []
    elapsed = last_time = 0.0
    last_interval = 0.0
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        _check_figure(run, figure, rows.fieldnames or ())
        for row in rows:
            now = float(row["_time"])
            interval = now - last_time if last_time else 0.0
            if last_interval and interval > 10 * last_interval + MINUTE_S:
                interval = last_interval
            elapsed, last_time, last_interval = elapsed + interval, now, interval
            if row.get(figure):
                # The result of an evaluation is logged later than the step of its weights.
                step = row.get("eval_step") if figure == "eval_return" else None
                steps.append(float(step or row["step"]))
                minutes.append(elapsed / MINUTE_S)
                values.append(float(row[figure]))
    if not steps:
        missing = "finished episode" if figure == RETURN else figure
        raise UsageError(f"{run} has no {missing} yet; there is nothing to draw.")
    return {"steps": steps, "minutes": minutes, "values": values}


def _check_figure(run: Path, figure: str, columns: Sequence[str]) -> None:
    known = [name for name in columns if name not in BESIDES]
    if known and figure not in known:
        raise UsageError(f"{run} has no figure {figure}; it has {', '.join(sorted(known))}.")


def draw(options: Options) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UsageError(
            "Curves are drawn by matplotlib, which is missing here: pip install matplotlib."
        ) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = [read_curve(run, options.figure) for run in options.runs]
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for run, curve in zip(options.runs, curves, strict=True):
        by_step.plot([step / 1e6 for step in curve["steps"]], curve["values"], label=run.name)
        by_time.plot(curve["minutes"], curve["values"], label=run.name)
    by_step.set_xlabel("environment steps, millions")
    by_time.set_xlabel("minutes")
    by_step.set_ylabel(options.figure + " (of the last 100)" * (options.figure == RETURN))
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
        options = tyro.cli(Options)
        draw(options)
        print(f"{options.figure} of {len(options.runs)} runs is drawn in {options.out}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
