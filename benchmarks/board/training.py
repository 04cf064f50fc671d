"""Makes one run of the scoreboard: watches a process for its minutes, and reads its curve."""

import contextlib
import csv
import importlib.util
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from board.runs import Point, Run, thin_out
from board.tasks import OURS, PEERS, TASKS, Peer, Task

BENCHMARKS = Path(__file__).resolve().parent.parent
SAMPLE_S = 5.0
END_S = 60.0  # time for a process to end after SIGTERM
VERSIONS_OF = (
    *("torchbeast", "torch", "gymnasium", "ale-py", "mujoco", "box2d", "minatar"),
    *("stable-baselines3", "sample-factory", "ray"),
)


class RunFailed(Exception):
    """A run without a result: its process failed, or no episode ended in it."""


def train(name: str, system: str, seed: int, minutes: float, args: str, kept: str) -> Run:
    """Make one run; `args` are further flags of ours, `kept` the system's name in its file."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        read: Callable[[Path, float], Iterator[Point]]
        if system == OURS:
            command, read = command_of_ours(task, seed, args, folder), read_ours
        else:
            make_environment(PEERS[system])
            command, read = command_of_peer(PEERS[system], task, seed, folder), read_peer
        log = folder / "output.txt"
        started, cpu_s = watch(command, minutes, log)
        curve = thin_out(read(folder, started), SAMPLE_S)
        if not curve:
            what = f"saw no episode end in {minutes:g} minutes"
            raise RunFailed(_last_words(command, what, log.read_text(errors="replace")))
    shown = shlex.join(["python", *command[1:]]).replace(f"{BENCHMARKS.parent}/", "")
    return Run(
        task=name,
        system=kept,
        seed=seed,
        minutes=minutes,
        cpu_s=round(cpu_s, 1),
        command=shown.replace(tmp, "FOLDER"),
        machine=describe_machine(),
        versions=versions_of(command[0]),
        curve=curve,
    )


def command_of_ours(task: Task, seed: int, args: str, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torchbeast.polybeast"),
        *(shlex.split(task.our_env) if task.our_env else ("--env", task.env)),
        *("--seed", str(seed), "--savedir", str(folder), "--xpid", "run", "--disable_cuda"),
        *shlex.split(task.args),
        *shlex.split(args),
    ]


def command_of_peer(peer: Peer, task: Task, seed: int, folder: Path) -> list[str]:
    python = peer.folder / "bin" / "python"
    return [
        *(str(python), str(BENCHMARKS / "peers" / peer.program), "--env", task.env),
        *("--seed", str(seed), "--out", str(folder / "curve.csv"), *shlex.split(peer.args)),
    ]


def make_environment(peer: Peer) -> None:
    """Make the peer's virtual environment, unless it is complete already."""
    programs, marker = peer.folder / "bin", peer.folder / "packages"
    packages = "\n".join(peer.packages)
    if marker.exists() and marker.read_text() == packages:
        return
    print(f"Making {peer.folder} (some minutes).", flush=True)
    venv.create(peer.folder, with_pip=True, clear=True)
    _call([str(programs / "python"), "-m", "pip", "install", "--quiet", *peer.packages])
    if peer.imports_roms:
        ale_py = importlib.util.find_spec("ale_py")
        assert ale_py is not None
        assert ale_py.origin is not None
        roms = Path(ale_py.origin).parent / "roms"
        _call([str(programs / "ale-import-roms"), str(roms)])
    marker.write_text(packages)


def _call(command: list[str]) -> None:
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise RunFailed(_last_words(command, f"ended with {run.returncode}", run.stdout))


def _last_words(command: list[str], what: str, output: str) -> str:
    tail = "\n".join(output.splitlines()[-15:])
    return f"{shlex.join(command)} {what}:\n{tail}"


# ----------------------------------------------------------------------------------------- watching


def watch(command: list[str], minutes: float, log: Path) -> tuple[float, float]:
    """Run a command for so many minutes, or until it ends; then kill all that it has started.

    Returns:
        When it was started, and the CPU-seconds of it and of all processes below it.
    """
    cpu: dict[psutil.Process, float] = {}
    with log.open("wb") as file:
        started = time.time()
        process = subprocess.Popen(
            command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while (left := started + 60 * minutes - time.time()) > 0 and process.poll() is None:
                cpu.update(_cpu_of_tree(process))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(left, SAMPLE_S))
            cpu.update(_cpu_of_tree(process))
            code = process.poll()
            if code is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
        finally:
            cpu.update(_cpu_of_tree(process))
            _kill(process, list(cpu))
    if code:
        output = log.read_text(errors="replace")
        raise RunFailed(_last_words(command, f"ended with {code}", output))
    return started, sum(cpu.values())


def _cpu_of_tree(top: "subprocess.Popen[bytes]") -> dict[psutil.Process, float]:
    found: dict[psutil.Process, float] = {}
    if top.poll() is not None:  # its pid may be another process's by now
        return found
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(top.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process] = times.user + times.system
    return found


def _kill(process: "subprocess.Popen[bytes]", below: list[psutil.Process]) -> None:
    """Kill the process, its group, and those below it that left the group (Ray's do)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()
    process.wait(END_S)


# ------------------------------------------------------------------------------------------ reading


def read_ours(folder: Path, started: float) -> Iterator[Point]:
    path = folder / "run" / "logs.csv"
    if not path.exists():
        return
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("mean_episode_return"):
                seconds = float(row["_time"]) - started
                yield Point(seconds, float(row["step"]), float(row["mean_episode_return"]))


def read_peer(folder: Path, started: float) -> Iterator[Point]:
    """Read rows of time, steps, mean return of the last 100 episodes; skips a partial last row."""
    path = folder / "curve.csv"
    if not path.exists():
        return
    with path.open(newline="") as file:
        for row in csv.reader(line for line in file if line.endswith("\n")):
            if row[0] != "time":
                yield Point(float(row[0]) - started, float(row[1]), float(row[2]))


def versions_of(python: str) -> str:
    """The versions of those packages in VERSIONS_OF that are installed for this Python."""
    program = (
        "import importlib.metadata as m, sys\n"
        "for n in sys.argv[1:]:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass\n"
    )
    run = subprocess.run([python, "-c", program, *VERSIONS_OF], capture_output=True, text=True)
    return ", ".join(run.stdout.splitlines())


def describe_machine() -> str:
    """Cores, processor and memory; hypervisors name different processors alike, families differ."""
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            facts[name.strip()] = value.strip()
    processor = facts.get("model name", platform.processor() or platform.machine())
    if "cpu family" in facts:
        processor += f" (family {facts['cpu family']}, model {facts.get('model')})"
    return f"{os.cpu_count()} x {processor}, {psutil.virtual_memory().total >> 30} GiB"
