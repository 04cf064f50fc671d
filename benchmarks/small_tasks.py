"""Curves of the small tasks in docs/results.md: trains missing runs, and draws one picture.

    python benchmarks/small_tasks.py [--tasks CartPole Catch ...] [--seeds 1 2] [--out curves.png]

Runs are kept as <savedir>/<task>-<seed>; one that has all its steps is not trained again. Prints a
line for each run, and as the last line one JSON object with the last returns.
"""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from torchbeast.report.plot import read_curve

ROOT = Path(__file__).parent.parent
COLUMNS = 4


@dataclass(frozen=True)
class Task:
    """The flags of a run, and its number of steps."""

    args: str
    total_steps: int = 200_000

    @property
    def words(self) -> list[str]:
        return [*self.args.split(), "--total_steps", str(self.total_steps)]


MINIGRID = (
    "--env MiniGrid-Empty-8x8-v0 --import minigrid --wrappers minigrid.wrappers:ImgObsWrapper"
)
TASKS = {
    "LunarLander": Task("--env LunarLander-v3", 1_000_000),
    "Acrobot": Task("--env Acrobot-v1", 1_000_000),
    "CartPole": Task("--env CartPole-v1", 1_000_000),
    "Pendulum": Task("--env Pendulum-v1", 1_000_000),
    "HalfCheetah": Task("--env HalfCheetah-v5", 1_000_000),
    "Hopper": Task("--env Hopper-v5", 1_000_000),
    "Catch": Task("--env Catch"),
    "Memory, LSTM": Task("--env Memory --use_lstm"),
    "Memory, GRU": Task("--env Memory --model examples.gru_memory:Agent"),
    "Memory, transformer": Task("--env Memory --model examples.transformer_memory:Agent"),
    "MiniGrid": Task(MINIGRID, 300_000),
    "MiniHack": Task("--env MiniHack-Room-5x5-v0 --import minihack", 60_000),
}


@dataclass(frozen=True)
class Options:
    """Train the small tasks of docs/results.md, and draw their curves."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Names of tasks; some need packages (docs/results.md)."""
    seeds: tuple[int, ...] = (1, 2)
    """Seeds, with one run of each task for each."""
    savedir: Path = Path("~/logs/torchbeast/curves")
    """Folder in which runs are kept."""
    out: Path = Path("curves.png")
    """The picture to write."""

    def run_of(self, task: str, seed: int) -> Path:
        name = task.replace(", ", "-").lower()
        return self.savedir.expanduser() / f"{name}-{seed}"


def is_finished(run: Path, task: Task) -> bool:
    """Whether the log has all steps."""
    return (run / "logs.csv").exists() and read_curve(run)["steps"][-1] >= task.total_steps


def train(options: Options, name: str, seed: int) -> None:
    run = options.run_of(name, seed)
    command = [sys.executable, "-m", "torchbeast.polybeast", *TASKS[name].words]
    command += ["--seed", str(seed), "--savedir", str(run.parent), "--xpid", run.name]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def draw(options: Options) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(COLUMNS, len(options.tasks))
    rows = math.ceil(len(options.tasks) / columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(2.6 * columns, 2.1 * rows), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(options.tasks) :]:
        panel.set_visible(False)
    for name, panel in zip(options.tasks, panels.flat, strict=False):
        for seed in options.seeds:
            curve = read_curve(options.run_of(name, seed))
            panel.plot([step / 1000 for step in curve["steps"]], curve["values"], linewidth=1)
        panel.set_title(name, fontsize=9)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.3)
    figure.supxlabel("environment steps, thousands", fontsize=8)
    figure.supylabel("mean_episode_return", fontsize=8)
    figure.savefig(options.out, dpi=110)


def main() -> int:
    options = tyro.cli(Options)
    returns: dict[str, list[float]] = {}
    for name in options.tasks:
        for seed in options.seeds:
            run = options.run_of(name, seed)
            if not is_finished(run, TASKS[name]):
                train(options, name, seed)
            curve = read_curve(run)
            returns.setdefault(name, []).append(round(curve["values"][-1], 2))
            print(
                f"{name}, {seed}: {returns[name][-1]}, {curve['minutes'][-1]:.1f} minutes",
                flush=True,
            )
    draw(options)
    print(json.dumps(returns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
