"""The scoreboard's report: kept runs as Markdown tables, a summary for each task, and curves.

Our runs and peers are compared by minutes; variants of ours, with one thing changed, by steps, so
that it does not matter what else ran on the machine.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from board.runs import Run
from board.tasks import OURS, PEERS, TASKS

TABLE_MINUTES = (5, 10, 20, 30)
TABLE_STEPS = (100_000, 200_000, 400_000, 600_000, 1_000_000)

Found = dict[str, dict[str, list[Run]]]
"""Runs by task and system."""


def describe(values: Sequence[float | None], form: str = ".4g") -> str:
    """The mean and the range of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = f"{statistics.mean(known):{form}}"
    return mean if len(known) == 1 else f"{mean} ({min(known):{form}} to {max(known):{form}})"


def table_of(task: str, systems: dict[str, list[Run]]) -> list[str]:
    """Markdown: a row for each system, with means over its seeds and their ranges."""
    threshold = TASKS[task].threshold
    columns = [
        *(task, "seeds", *(f"{m} min" for m in TABLE_MINUTES)),
        *(f"minutes to {threshold:g}", "steps to it", "CPU-seconds", "CPU us a step"),
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for system, runs in systems.items():
        hits = [point for run in runs if (point := run.first_above(threshold)) is not None]
        missed = f"{len(runs) - len(hits)} of {len(runs)} never" if len(hits) < len(runs) else ""
        minutes = describe([point.seconds / 60 for point in hits])
        cells = [
            *(system, str(len(runs))),
            *(describe([run.return_at(m) for run in runs]) for m in TABLE_MINUTES),
            ", ".join(part for part in (minutes, missed) if part),
            describe([point.steps for point in hits], ",.0f"),
            describe([run.cpu_s for run in runs], ",.0f"),
            describe([1e6 * run.cpu_s / run.num_steps for run in runs if run.num_steps]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary_of(systems: dict[str, list[Run]]) -> dict[str, Any]:
    """Mean returns of ours and of the best peer, at the last minute that all runs have."""
    runs = {name: runs for name, runs in systems.items() if name == OURS or name in PEERS}
    minutes = min((run.minutes for some in runs.values() for run in some), default=0.0)
    means = {}
    for name, some in runs.items():
        returns = [value for run in some if (value := run.return_at(minutes)) is not None]
        if returns:
            means[name] = round(statistics.mean(returns), 3)
    ours = means.pop(OURS, None)
    best = max(means, key=lambda name: means[name], default=None)
    return {
        "ours": ours,
        "best_peer": None if best is None else means[best],
        "best_peer_name": best,
        "minutes": minutes,
    }


def split(found: Found) -> tuple[Found, Found]:
    """Runs of ours and peers; and runs of ours and its variants, for the tasks that have any."""
    compared, varied = {}, {}
    for task, systems in found.items():
        variants = {name for name in systems if name != OURS and name not in PEERS}
        compared[task] = {name: runs for name, runs in systems.items() if name not in variants}
        if variants:
            chosen = variants | {OURS}
            varied[task] = {name: runs for name, runs in systems.items() if name in chosen}
    return {task: systems for task, systems in compared.items() if systems}, varied


def table_of_variants(task: str, systems: dict[str, list[Run]]) -> list[str]:
    """Markdown: a row for each variant of ours, by steps."""
    threshold = TASKS[task].threshold
    columns = [task, "seeds", *(f"{steps / 1e6:g} M" for steps in TABLE_STEPS)]
    lines = [f"| {' | '.join([*columns, f'steps to {threshold:g}'])} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name, runs in systems.items():
        hits = [point for run in runs if (point := run.first_above(threshold)) is not None]
        cells = [
            *(name, str(len(runs))),
            *(describe([run.return_after(steps) for run in runs]) for steps in TABLE_STEPS),
            describe([point.steps for point in hits], ",.0f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(found: Found, path: Path, *, by_steps: bool = False) -> None:
    """Write a picture of the learning curves, with a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_columns = min(3, len(found))
    num_rows = -(-len(found) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(5 * num_columns, 3.6 * num_rows), squeeze=False
    )
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, (task, systems) in zip(axes.flat, found.items(), strict=False):
        for system, runs in systems.items():
            _draw_band(axis, system, [run for run in runs if run.curve], by_steps)
        axis.axhline(TASKS[task].threshold, color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(TASKS[task].env)
        axis.set_xlabel("million steps" if by_steps else "minutes")
        axis.set_ylabel("mean return")
        axis.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_band(axis: Any, system: str, runs: list[Run], by_steps: bool) -> None:
    """Draw the mean over seeds and the band from worst to best, for as long as all of them ran.

    By minutes, a run that ended early keeps its last value.
    """
    import numpy as np

    if not runs:
        return
    if by_steps:
        xs = [[p.steps / 1e6 for p in run.curve] for run in runs]
        ends = [x[-1] for x in xs]
    else:
        xs = [[p.seconds / 60 for p in run.curve] for run in runs]
        ends = [run.minutes for run in runs]
    start = max(x[0] for x in xs)
    grid = np.linspace(start, max(start, min(ends)), 200)
    returns = np.array(
        [
            np.interp(grid, x, [p.mean_return for p in run.curve])
            for x, run in zip(xs, runs, strict=True)
        ]
    )
    [line] = axis.plot(grid, returns.mean(axis=0), label=f"{system} ({len(runs)})")
    if len(runs) > 1:
        low, high = returns.min(axis=0), returns.max(axis=0)
        axis.fill_between(grid, low, high, alpha=0.2, color=line.get_color())
