"""Policy lag with the defaults of larger machines, and while environments join and leave.

First PolyBeast with Mock frames and its defaults for 4, 16 and 64 cores: with the processes of such
a machine, but this one's cores. Then a learner of small environments (Catch) that listens, while
clients join until there are 1,024 environments, and leave again. Both with batches that grow with
the number of environments, and with fixed batches of 8. Last line: JSON.

    python benchmarks/elastic.py [--cores 4 16 64] [--seconds 20]
"""

import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import tyro

START_S = 600.0  # time limit for all processes to start, on a machine that is busy
JOIN_S = 10.0  # time for a client to make its environments and join
STOP_S = 60.0
CLIENTS = (8, 56, 448, 512)  # environments of each client; 1,024 in total
MOCK = ("--env", "Mock", "--learner_cpu_threads", "1", "--batch_size", "8", "--unroll_length", "20",
        "--num_passes", "1", "--num_minibatches", "1", "--clip_ratio", "None")  # fmt: skip
CATCH = ("--env", "Catch", "--no-hold_actors", "--num_passes", "1", "--num_minibatches", "1",
         "--clip_ratio", "None", "--unroll_length", "20", "--batch_size", "8")  # fmt: skip
PRETEND = """
import os, sys
os.sched_getaffinity = lambda _: set(range({num_cores}))
from torchbeast import polybeast
from torchbeast.run.command_line import run_command_line
sys.exit(run_command_line(polybeast.Flags, polybeast.main, sys.argv[1:]))
"""


@dataclass(frozen=True)
class Options:
    """Measure policy lag."""

    cores: tuple[int, ...] = (4, 16, 64)
    """Numbers of cores of the machines to imitate."""
    seconds: float = 20.0
    """Length of each measurement, after the first 32 updates."""


class Run:
    """A training run in the background."""

    def __init__(self, program: list[str], folder: Path, *args: str) -> None:
        self._folder = folder / "run"
        self._output = folder / "output"
        flags = ["--savedir", str(folder), "--xpid", "run", "--log_interval_s", "0.5",
                 "--total_steps", "1000000000", "--disable_checkpoint"]  # fmt: skip
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *program, *flags, *args], stdout=output, stderr=output
            )

    def rows(self) -> list[dict[str, str]]:
        with suppress(FileNotFoundError), (self._folder / "logs.csv").open(newline="") as file:
            return list(csv.DictReader(file))
        return []

    def wait_for(self, ready: str) -> None:
        self._wait(lambda: ready in self._output.read_text())

    def wait_for_updates(self, number: int) -> None:
        """Wait for so many more updates."""

        def count() -> int:
            rows = self.rows()
            return int(rows[-1]["updates"] or 0) if rows else 0

        target = count() + number
        self._wait(lambda: count() >= target)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"It did not get there:\n{self._output.read_text()}")
            time.sleep(0.5)

    def measure(self, seconds: float) -> dict[str, float]:
        """Means over so many seconds, after 32 updates, so that older rollouts are gone."""
        self.wait_for_updates(32)
        before = len(self.rows())
        time.sleep(seconds)
        rows = [row for row in self.rows()[before:] if row["policy_lag"] and row["batch_size"]]
        lags = [float(row["policy_lag"]) for row in rows]
        return {
            "batch_size": round(float(rows[-1]["batch_size"]), 1),
            "policy_lag": round(statistics.mean(lags), 1),
            "largest_policy_lag": round(max(lags), 1),
            "sps": round(statistics.mean(float(row["sps"]) for row in rows)),
        }

    def close(self) -> None:
        stop(self._process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    process.kill()


def on_cores(num_cores: int, seconds: float, *args: str) -> dict[str, float]:
    """Measure with the environments that PolyBeast has on so many cores with IMPALA's settings."""
    program = ["-c", PRETEND.format(num_cores=num_cores)]
    with tempfile.TemporaryDirectory() as folder:
        run = Run(program, Path(folder), *MOCK, *args)
        try:
            return run.measure(seconds)
        finally:
            run.close()


def with_clients(seconds: float, *args: str) -> dict[str, dict[str, float]]:
    """Measure while clients join, and then leave; results by the number of environments."""
    figures = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"unix:{folder}/learner"
        run = Run(
            ["-m", "torchbeast.polybeast_learner"], folder, *CATCH, *args, "--listen", address
        )
        stack.callback(run.close)
        run.wait_for("dial in at")
        clients: list[subprocess.Popen[bytes]] = []
        for num_envs, total in zip(CLIENTS, itertools.accumulate(CLIENTS), strict=True):
            clients.append(dial(address, num_envs))
            stack.callback(stop, clients[-1])
            time.sleep(JOIN_S)
            figures[str(total)] = run.measure(seconds)
            print_row(f"{total} environments", figures[str(total)])
        for client in clients[1:]:
            stop(client)
        figures["8 again"] = run.measure(seconds)
        print_row("8 environments again", figures["8 again"])
    return figures


def dial(address: str, num_envs: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torchbeast.polybeast_env", "--env", "Catch", "--connect",
               address, "--num_servers", "1", "--envs_per_server", str(num_envs)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def print_row(what: str, figures: dict[str, float]) -> None:
    text = ", ".join(f"{name} {value:,}" for name, value in figures.items())
    print(f"  {what}: {text}", flush=True)


def main(options: Options) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, object] = {"target_policy_lag": 16}
    for name, args in [("fixed", ()), ("following", ("--target_policy_lag", "16"))]:
        print(f"Mock frames, {name} batches", flush=True)
        for num_cores in options.cores:
            figures = on_cores(num_cores, options.seconds, *args)
            print_row(f"defaults for {num_cores} cores", figures)
            result[f"{num_cores}_cores_{name}"] = figures
    for name, args in [("fixed", ()), ("following", ("--target_policy_lag", "16"))]:
        print(f"Catch, clients that join and leave, {name} batches", flush=True)
        result[f"clients_{name}"] = with_clients(options.seconds, *args)
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options))
