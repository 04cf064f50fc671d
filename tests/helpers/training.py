"""Training runs with the command lines of their users, for the tests of both beasts."""

import csv
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.helpers.warm_python import ROOT, WarmPopen
from torchbeast.run.recipes import VECTOR

TIMEOUT_S = 240  # for a machine that is busy with other things
# Steps: the open rollouts of 32 environments, and those in the queue, less than a batch.
MORE_THAN_IS_ON_ITS_WAY = 2 * VECTOR["unroll_length"] * VECTOR["batch_size"]


def command(module, savedir, *args):
    return [sys.executable, "-m", f"torchbeast.{module}", "--savedir", str(savedir), *args]


def run(module, savedir, *args, **options):
    """Until it ends: its exit code, and what it printed."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        args = command(module, savedir, *args)
        process = WarmPopen(args, stdout=stdout.fileno(), stderr=stderr.fileno(), **options)
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(args, process.returncode, stdout.read(), stderr.read())


def read_logs(folder: Path):
    with (folder / "logs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def newest_figures(folder: Path):
    """The newest of each; a row has only what came about since the one before."""
    figures = {}
    for row in read_logs(folder):
        figures.update({name: value for name, value in row.items() if value})
    return figures


def read_connections(folder: Path) -> list[dict[str, str]]:
    """A row for each client; none before the file is written."""
    path = folder / "connections.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def shared_memory():
    """PyTorch's shared memory whose process is gone; others may be at work beside this test."""
    paths = list(Path("/dev/shm").glob("torch_*_*"))  # torch_<process>_<some number>
    return {path for path in paths if _is_left(path)}


def _is_left(path):
    with suppress(FileNotFoundError):  # removed at its process's end
        made_at = path.stat().st_mtime
        try:  # a process that is younger than the file has the number of the one that made it
            is_gone = psutil.Process(int(path.name.split("_")[1])).create_time() > made_at + 1
        except psutil.NoSuchProcess:
            is_gone = True
        return is_gone and path.exists()
    return False


class Background:
    """A command in the background, and what it prints."""

    def __init__(self, command, output_path, popen=subprocess.Popen, **options):
        self.output_path = output_path
        self._lines = output_path.open("w")
        fd = self._lines.fileno()
        self.process = popen(command, stdout=fd, stderr=fd, **options)
        self._main = psutil.Process(self.process.pid)

    @property
    def output(self):
        return self.output_path.read_text()

    def wait_for(self, condition, what):
        """Returns what the condition has returned at last."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"no {what} within {TIMEOUT_S} s:\n{self.output}"
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            time.sleep(0.05)
        return found

    def family(self):
        return [self._main, *self._main.children(recursive=True)]

    def end(self, number, send=os.kill):
        """Send a signal, wait for the end, and see that nothing is left behind."""
        family = self.family()
        send(self.process.pid, number)
        code = self.process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(family[1:], timeout=30)
        assert not alive, alive
        return code

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for process in self.family():
                    process.kill()
        self.process.wait(TIMEOUT_S)
        self._lines.close()


class Training(Background):
    """A training run in the background."""

    def __init__(self, module, savedir, *args, prefix=(), **options):
        self.folder = savedir / "run"
        super().__init__(
            [
                *prefix,
                *command(module, savedir, "--xpid", "run", "--log_interval_s", "0.2", *args),
            ],
            savedir / "output",
            popen=subprocess.Popen if prefix else WarmPopen,
            **options,
        )

    def wait_for_step(self, step):
        self.wait_for(lambda: self.step >= step, f"step {step}")
        return self

    @property
    def step(self):
        """The last that was printed; 0 if none was."""
        steps = re.findall(r"^step ([\d,]+)", self.output, re.MULTILINE)
        return int(steps[-1].replace(",", "")) if steps else 0

    def stop(self, number, code, send=os.kill):
        """Send a signal: the run must say so, save, and end with this code."""
        assert self.end(number, send) == code
        assert "Traceback" not in self.output
        assert f"Stopped by {number.name}" in self.output
        steps = torch.load(self.folder / "model.tar", weights_only=True)["stats"]["step"]
        assert steps == int(read_logs(self.folder)[-1]["step"])

    def actors(self):
        """The processes that have no children and are not multiprocessing's own helper."""
        leaves = [p for p in self.family()[1:] if not p.children()]
        return [p for p in leaves if "resource_tracker" not in " ".join(p.cmdline())]


class RemoteEnvironments(Background):
    """`polybeast_env` in the background."""

    def __init__(self, folder, *args, prefix=(), **options):
        program = [sys.executable, "-m", "torchbeast.polybeast_env"]
        super().__init__([*prefix, *program, *args], folder / "environments", **options)


class RemoteActors(Background):
    """`polybeast_actor` in the background."""

    def __init__(self, folder, *args, **options):
        program = [sys.executable, "-m", "torchbeast.polybeast_actor"]
        super().__init__([*program, *args], folder / "actors", **options)


def listening_at(training: Training) -> str | None:
    """The address of a learner with --listen, once it has one."""
    found = re.search(r"dial in at (\S+)\.$", training.output, re.MULTILINE)
    return found and found[1]


def mean_return(training: Training) -> float:
    """The newest, of 100 episodes; of fewer, which may be luck, it is less than any."""
    path = training.folder / "logs.csv"
    rows = read_logs(training.folder) if path.exists() else []
    if not rows or int(rows[-1].get("episodes") or 0) < 100:
        return -math.inf
    return float(rows[-1]["mean_episode_return"])


def learn(module, savedir, bar, *args):
    """Train until the mean return is above the bar; fails if the run is over before."""
    with Training(module, savedir, *args, cwd=ROOT) as training:
        training.wait_for(lambda: mean_return(training) > bar, f"mean return above {bar}")
        assert training.end(signal.SIGTERM) == 0


def final_return(folder):
    return float(read_logs(folder)[-1]["mean_episode_return"])


FRAGILE = """
import gymnasium

class Fragile(gymnasium.Wrapper):
    steps = 0
    def step(self, action):
        self.steps += 1
        if self.steps == {limit}:
            {what}
        return self.env.step(action)

def make():
    return Fragile(gymnasium.make("CartPole-v1"))
"""


def fragile(tmp_path, limit, what):
    """The variables of a process that finds an environment `fragile:make`, which breaks."""
    (tmp_path / "fragile.py").write_text(FRAGILE.format(limit=limit, what=what))
    return {**os.environ, "PYTHONPATH": str(tmp_path)}
