"""What minutes of training are worth on this machine: ours and peers, task by task.

    python benchmarks/scoreboard.py --tasks pong breakout --systems ours sb3-ppo --minutes 20
    python benchmarks/scoreboard.py --report

Every run is one small file in `benchmarks/results/`, with the machine, versions and command in its
first line. Runs that are there already are not done again, so that the table can be grown run by
run, in any order and after any interruption. The clock of a run starts with its process.

A peer lives in a virtual environment that is made when it is first needed, with the settings that
its authors recommend (`benchmarks/peers/`). The report draws all kept runs and prints a table; its
last line is a JSON object.
"""

import contextlib
import csv
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import tyro

HERE = Path(__file__).resolve().parent
SAMPLE_S = 5.0
END_S = 60.0  # for a process to end after SIGTERM
TABLE_MINUTES = (5, 10, 20, 30)


@dataclass(frozen=True)
class Task:
    """Something to learn."""

    env: str
    threshold: float
    """The mean return from which on it counts as learnt."""
    args: str = ""
    """Further flags of ours, where the plain command would not do."""
    peers: bool = True
    """Whether peers can be given it."""


TASKS = {
    "pong": Task("PongNoFrameskip-v4", 18),
    "breakout": Task("BreakoutNoFrameskip-v4", 100),
    "spaceinvaders": Task("SpaceInvadersNoFrameskip-v4", 500),
    "qbert": Task("QbertNoFrameskip-v4", 2000),
    "cartpole": Task("CartPole-v1", 475),
    "lunarlander": Task("LunarLander-v3", 200),
    "acrobot": Task("Acrobot-v1", -100),
    "halfcheetah": Task("HalfCheetah-v5", 1500),
    "memory": Task("Memory", 0.95, "--use_lstm", peers=False),
}


@dataclass(frozen=True)
class Peer:
    """A program in `benchmarks/peers/`, and what it needs from PyPI."""

    program: str
    args: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Its virtual environment; peers that need the same share one."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        return cache / "torchbeast-scoreboard" / self.program.removesuffix(".py")


SB3_PACKAGES = (
    "torch==2.13.0",
    "stable-baselines3==2.9.*",
    "gymnasium[box2d,mujoco]",
    "ale-py",
    "opencv-python-headless",
    "sb3-contrib==2.9.*",
)
PEERS = {
    "sb3-ppo": Peer("sb3.py", "--algo ppo", SB3_PACKAGES),
    "sb3-a2c": Peer("sb3.py", "--algo a2c", SB3_PACKAGES),
}
OURS = "ours"


@dataclass(frozen=True)
class Options:
    """Train tasks for minutes with ours and peers, and report what came of it."""

    tasks: tuple[str, ...] = ("pong",)
    """Of TASKS."""
    systems: tuple[str, ...] = (OURS,)
    """ours, or names of PEERS."""
    seeds: int = 3
    """Runs of each."""
    minutes: float = 20.0
    """Length of each run."""
    args: str = ""
    """Further flags of ours; such runs are no results and need another --name."""
    name: str = OURS
    """What ours are called in the files."""
    results: Path = HERE / "results"
    """Where runs are kept."""
    picture: Path = HERE.parent / "docs" / "curves" / "scoreboard.png"
    """Where the report draws the curves."""
    report: bool = False
    """Train nothing; make table and picture from the kept files."""


class Point(NamedTuple):
    """Of a learning curve."""

    seconds: float
    steps: float
    mean_return: float


@dataclass(frozen=True)
class Run:
    """A kept run."""

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
        """As a whole or not at all."""
        path = self.path(results, self.task, self.system, self.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {name: value for name, value in asdict(self).items() if name != "curve"}
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("w", newline="") as file:
            file.write(f"# {json.dumps(about)}\n")
            writer = csv.writer(file)
            writer.writerow(Point._fields)
            for p in self.curve:
                writer.writerow((round(p.seconds, 1), int(p.steps), round(p.mean_return, 3)))
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Run":
        with path.open(newline="") as file:
            about = json.loads(file.readline().removeprefix("# "))
            rows = csv.DictReader(file)
            curve = tuple(Point(*(float(row[name]) for name in Point._fields)) for row in rows)
        return cls(**about, curve=curve)

    def return_at(self, minutes: float) -> float | None:
        """The last mean return until then; None if the run was shorter or had no episode."""
        if minutes > self.minutes + 0.01:
            return None
        until = [p.mean_return for p in self.curve if p.seconds <= 60 * minutes]
        return until[-1] if until else None

    def first_above(self, threshold: float) -> Point | None:
        return next((p for p in self.curve if p.mean_return >= threshold), None)


# ----------------------------------------------------------------------------------------- running


def train_ours(task: Task, seed: int, options: Options, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torchbeast.polybeast", "--env", task.env, "--seed", str(seed)),
        *("--savedir", str(folder), "--xpid", "run", "--disable_cuda"),
        *shlex.split(task.args),
        *shlex.split(options.args),
    ]


def train_peer(peer: Peer, task: Task, seed: int, folder: Path) -> list[str]:
    python = make_environment(peer)
    return [
        *(str(python), str(HERE / "peers" / peer.program), "--env", task.env),
        *("--seed", str(seed), "--out", str(folder / "curve.csv"), *shlex.split(peer.args)),
    ]


def make_environment(peer: Peer) -> Path:
    """Python of the peer's virtual environment, with its packages."""
    python, marker = peer.folder / "bin" / "python", peer.folder / "packages"
    packages = "\n".join(peer.packages)
    if marker.exists() and marker.read_text() == packages:
        return python
    print(f"Making {peer.folder}.", flush=True)
    venv.create(peer.folder, with_pip=True, clear=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *peer.packages], check=True)
    marker.write_text(packages)
    return python


def versions_of(python: str) -> str:
    """Of the packages that matter, as far as they are installed there."""
    names = ("torch", "gymnasium", "ale-py", "stable-baselines3", "torchbeast")
    program = (
        "import importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    run = subprocess.run([python, "-c", program, *names], capture_output=True, text=True)
    return ", ".join(run.stdout.splitlines())


def describe_machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((s.partition(":")[2].strip() for s in lines if "model name" in s), model)
    return f"{os.cpu_count()} x {model}, {psutil.virtual_memory().total >> 30} GiB"


def watch(command: list[str], minutes: float, log: Path) -> tuple[float, float]:
    """Run a command for so long; returns when it was started and its CPU-seconds, with those of all
    processes below it."""
    cpu: dict[int, float] = {}
    with log.open("wb") as file:
        started = time.time()
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while (left := started + 60 * minutes - time.time()) > 0:
                try:
                    process.wait(min(left, SAMPLE_S))
                    break
                except subprocess.TimeoutExpired:
                    cpu.update(_cpu_of_tree(process.pid))
            if process.poll() is None:
                process.terminate()
                process.wait(END_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(process)
    if process.returncode not in (0, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}:\n{tail}")
    return started, sum(cpu.values())


def _cpu_of_tree(pid: int) -> dict[int, float]:
    found = {}
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        pass
    return found


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)


def read_ours(folder: Path, started: float) -> Iterator[Point]:
    with (folder / "run" / "logs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("mean_episode_return"):
                seconds = float(row["_time"]) - started
                yield Point(seconds, float(row["step"]), float(row["mean_episode_return"]))


def read_peer(folder: Path, started: float) -> Iterator[Point]:
    """Rows of time, steps, mean return of the last 100 episodes."""
    with (folder / "curve.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["time"]) - started
            yield Point(seconds, float(row["steps"]), float(row["mean_return"]))


def thin_out(points: Iterator[Point], seconds: float = SAMPLE_S) -> tuple[Point, ...]:
    kept: list[Point] = []
    for point in points:
        if not kept or point.seconds >= kept[-1].seconds + seconds:
            kept.append(point)
    return tuple(kept)


def train(name: str, system: str, seed: int, options: Options) -> Run:
    """One run, from start to end."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        if system == OURS:
            command, read = train_ours(task, seed, options, folder), read_ours
        else:
            command, read = train_peer(PEERS[system], task, seed, folder), read_peer
        started, cpu_s = watch(command, options.minutes, folder / "output.txt")
        curve = thin_out(read(folder, started))
    shown = shlex.join(["python", *command[1:]]).replace(str(HERE.parent) + "/", "")
    return Run(
        task=name,
        system=options.name if system == OURS else system,
        seed=seed,
        minutes=options.minutes,
        cpu_s=round(cpu_s, 1),
        command=shown.replace(tmp, "FOLDER"),
        machine=describe_machine(),
        versions=versions_of(command[0]),
        curve=curve,
    )


def train_all(options: Options) -> None:
    for seed in range(1, options.seeds + 1):  # seed by seed: whatever is there is comparable
        for name in options.tasks:
            for system in options.systems:
                if system != OURS and not TASKS[name].peers:
                    continue
                kept = options.name if system == OURS else system
                path = Run.path(options.results, name, kept, seed)
                if path.exists() and Run.load(path).minutes >= options.minutes:
                    print(f"{path.name} of {name} is there already.", flush=True)
                    continue
                run = train(name, system, seed, options)
                run.save(options.results)
                last = f"{run.curve[-1].mean_return:.2f}" if run.curve else "no episode"
                print(f"{name}, {kept}, seed {seed}: {last}", flush=True)


# --------------------------------------------------------------------------------------- reporting


def load_all(results: Path) -> dict[str, dict[str, list[Run]]]:
    """By task and system, ours first."""
    found: dict[str, dict[str, list[Run]]] = {}
    for path in sorted(results.glob("*/*.csv")):
        run = Run.load(path)
        found.setdefault(run.task, {}).setdefault(run.system, []).append(run)
    return {
        task: dict(sorted(systems.items(), key=lambda item: (item[0] != OURS, item[0])))
        for task, systems in found.items()
    }


def describe(values: Sequence[float | None]) -> str:
    """The mean and the range of what there is."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = f"{statistics.mean(known):.4g}"
    return mean if len(known) == 1 else f"{mean} ({min(known):.4g} to {max(known):.4g})"


def table_of(task: str, systems: dict[str, list[Run]]) -> list[str]:
    """Markdown."""
    threshold = TASKS[task].threshold
    heads = [f"{m} min" for m in TABLE_MINUTES]
    columns = [task, "seeds", *heads, f"minutes to {threshold:g}", "steps to it", "CPU us a step"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for system, runs in systems.items():
        reached = [run.first_above(threshold) for run in runs]
        hits = [point for point in reached if point is not None]
        missed = f", {len(runs) - len(hits)} of {len(runs)} never" if len(hits) < len(runs) else ""
        steps = [run.curve[-1].steps for run in runs if run.curve]
        cpu = [1e6 * run.cpu_s / n for run, n in zip(runs, steps, strict=False) if n]
        cells = [
            *(system, str(len(runs))),
            *(describe([run.return_at(m) for run in runs]) for m in TABLE_MINUTES),
            describe([point.seconds / 60 for point in hits]) + missed,
            describe([point.steps for point in hits]),
            describe(cpu),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary_of(systems: dict[str, list[Run]]) -> dict[str, Any]:
    """Ours and the best peer, after the longest time that all of them have."""
    runs = {name: runs for name, runs in systems.items() if name == OURS or name in PEERS}
    minutes = min(run.minutes for some in runs.values() for run in some) if runs else 0.0
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


def draw(found: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """A panel for each task: means over seeds, with the band from the worst to the best."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    num_columns = min(3, len(found))
    num_rows = -(-len(found) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(5 * num_columns, 3.6 * num_rows), squeeze=False
    )
    for axis in axes.flat[len(found) :]:
        axis.axis("off")
    for axis, (task, systems) in zip(axes.flat, found.items(), strict=False):
        for system, runs in systems.items():
            curves = [run.curve for run in runs if run.curve]
            if not curves:
                continue
            start = max(curve[0].seconds for curve in curves)
            end = min(curve[-1].seconds for curve in curves)
            at = np.linspace(start, max(start, end), 200)
            values = np.array(
                [
                    np.interp(at, [p.seconds for p in curve], [p.mean_return for p in curve])
                    for curve in curves
                ]
            )
            [line] = axis.plot(at / 60, values.mean(axis=0), label=f"{system} ({len(curves)})")
            if len(curves) > 1:
                low, high = values.min(axis=0), values.max(axis=0)
                axis.fill_between(at / 60, low, high, alpha=0.2, color=line.get_color())
        axis.axhline(TASKS[task].threshold, color="grey", linewidth=0.8, linestyle=":")
        axis.set_title(TASKS[task].env)
        axis.set_xlabel("minutes")
        axis.set_ylabel("mean return")
        axis.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(options: Options) -> None:
    found = load_all(options.results)
    if not found:
        sys.exit(f"There is no run in {options.results} yet; train some first.")
    for task, systems in found.items():
        print("\n".join([*table_of(task, systems), ""]))
    draw(found, options.picture)
    print(f"Curves: {options.picture}")
    print(json.dumps({task: summary_of(systems) for task, systems in found.items()}))


def main(options: Options) -> None:
    for kind, given, known in (
        ("task", options.tasks, list(TASKS)),
        ("system", options.systems, [OURS, *PEERS]),
    ):
        for name in given:
            if name not in known:
                sys.exit(f"There is no {kind} {name!r}; choose from {', '.join(known)}.")
    if options.args and options.name == OURS:
        sys.exit("Runs with --args are not the defaults: give them a --name of their own.")
    if not options.report:
        train_all(options)
    report(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
