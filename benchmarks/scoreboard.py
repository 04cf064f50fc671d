"""What an agent learns in minutes on this machine: ours and peers, task by task.

    python benchmarks/scoreboard.py --tasks pong breakout --systems ours sb3-ppo --minutes 20
    python benchmarks/scoreboard.py --report

Every run is one small file in `benchmarks/results/`, with the machine, versions and command in its
first line. Runs that are there already are not done again, so that the table can be grown run by
run, in any order and after any interruption. The clock of a run starts with its process.

A peer lives in a virtual environment that is made when it is first needed, with the settings that
its authors recommend (`benchmarks/peers/`). Returns are those of whole games with their own
rewards, as means of the last 100, and steps are the agent's (four frames of an Atari game). The
report draws all kept runs and prints tables: ours and peers by minutes, variants of ours (`--name`,
`--args`) by steps. Its last line is a JSON object.
"""

import importlib.metadata
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from board.report import draw, split, summary_of, table_of, table_of_variants
from board.runs import Run, load_all
from board.tasks import OURS, PEERS, TASKS
from board.training import RunFailed, train

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PICTURES = HERE.parent / "docs" / "curves"


@dataclass(frozen=True)
class Options:
    """Train tasks for minutes with ours and peers, and report the results."""

    tasks: tuple[str, ...] = ()
    """Names of TASKS; without any, nothing is trained."""
    systems: tuple[str, ...] = (OURS,)
    """ours, or names of PEERS."""
    seeds: int = 3
    """Number of runs of each task and system."""
    minutes: float = 20.0
    """Minutes of each run."""
    args: str = ""
    """Further flags of ours; such runs do not show the defaults, and need another --name."""
    name: str = OURS
    """The name of our runs in the files."""
    results: Path = RESULTS
    """Folder in which runs are kept."""
    pictures: Path | None = None
    """Folder for the report's curves; None: docs/curves, or --results if that is given."""
    report: bool = False
    """Train nothing; make tables and pictures from the kept files."""

    @property
    def pictures_folder(self) -> Path:
        if self.pictures is not None:
            return self.pictures
        return PICTURES if self.results == RESULTS else self.results


def train_all(options: Options) -> list[str]:
    """Do the runs that are missing; returns those that failed, after which the others still run.

    Seed by seed, so that the runs done so far can be compared.
    """
    failed = []
    for seed in range(1, options.seeds + 1):
        for name in options.tasks:
            for system in options.systems:
                if system != OURS and not TASKS[name].peers:
                    continue
                kept = options.name if system == OURS else system
                path = Run.path(options.results, name, kept, seed)
                if path.exists() and Run.load(path).minutes >= options.minutes:
                    print(f"{path.name} of {name} is there already.", flush=True)
                    continue
                try:
                    run = train(name, system, seed, options.minutes, options.args, kept)
                except RunFailed as error:
                    failed.append(f"{name}, {kept}, seed {seed}")
                    print(f"{failed[-1]}: {error}", file=sys.stderr, flush=True)
                    continue
                run.save(options.results)
                last = run.curve[-1].mean_return
                print(f"{name}, {kept}, seed {seed}: {last:.2f}", flush=True)
    return failed


def report(options: Options) -> None:
    found = load_all(options.results)
    if not found:
        sys.exit(f"There is no run in {options.results} yet; train some with --tasks first.")
    compared, varied = split(found)
    tables = [table_of(task, systems) for task, systems in compared.items()]
    tables += [table_of_variants(task, systems) for task, systems in varied.items()]
    for table in tables:
        print("\n".join([*table, ""]))
    for name, runs in (("scoreboard", compared), ("variants", varied)):
        if runs:
            path = options.pictures_folder / f"{name}.png"
            draw(runs, path, by_steps=name == "variants")
            print(f"Curves: {path}")
    print(json.dumps({task: summary_of(systems) for task, systems in compared.items()}))


def check(options: Options) -> None:
    """Exit with a message if the options make no sense."""
    for kind, given, known in (
        ("task", options.tasks, list(TASKS)),
        ("system", options.systems, [OURS, *PEERS]),
    ):
        for name in given:
            if name not in known:
                sys.exit(f"There is no {kind} {name!r}; choose from {', '.join(known)}.")
    if options.args and options.name == OURS:
        sys.exit("Runs with --args are not the defaults: give them a --name of their own.")
    if options.name in PEERS:
        sys.exit(f"--name {options.name} is a peer's; choose another.")
    for name in options.tasks if OURS in options.systems and not options.report else ():
        if (package := TASKS[name].package) and not is_installed(package):
            sys.exit(f"The task {name} needs {package}: pip install {package}.")


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def end_as_after_ctrl_c() -> None:
    """Exit after SIGTERM and SIGHUP: the current run ends with all processes, without a file."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def main(options: Options) -> None:
    check(options)
    failed = [] if options.report else train_all(options)
    report(options)
    if failed:
        sys.exit(f"Failed: {'; '.join(failed)}.")


if __name__ == "__main__":
    end_as_after_ctrl_c()
    main(tyro.cli(Options))
