"""What a fleet of environments costs, for the sizing guide in docs/cluster.md.

A learner listens on loopback with TLS and a token; a local fleet dials it through a relay, which
counts bytes. For Atari frames and for small vectors, it measures the CPU time of a step in each
kind of process, the bytes of a step, and memory with few and with more environments. The figures of
1,000 environments in the guide are extrapolated from these. Last line: JSON.
"""

import asyncio
import contextlib
import csv
import json
import multiprocessing
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro

from torchbeast import keys

START_S = 240.0
# Atari with IMPALA's settings: one pass over unrolls of 20 steps.
TASKS = {
    "atari": "--env PongNoFrameskip-v4 --unroll_length 20 --batch_size 8 --num_passes 1 "
    "--num_minibatches 1 --clip_ratio None --no-normalize_advantages --optimizer rmsprop",
    "vector": "--env CartPole-v1",
}
MIB = 1 << 20


@dataclass(frozen=True)
class Options:
    """Measure what a fleet costs."""

    seconds: float = 20.0
    """Length of each measurement."""
    few: int = 2
    """Servers of 16 environments for measuring CPU time and bytes."""
    more: int = 6
    """Servers for measuring how much memory each further environment takes."""


def main() -> None:
    options = tyro.cli(Options)
    figures: dict[str, float] = {}
    for name, task in TASKS.items():
        measured = measure(task.split(), options.few, options.seconds)
        more = measure(task.split(), options.more, options.seconds / 4)
        num_envs = 16 * (options.more - options.few)
        for part in ("gateway", "learner"):
            grown = more[f"{part}_mib"] - measured[f"{part}_mib"]
            measured[f"{part}_mib_per_env"] = grown / num_envs
        figures |= {f"{name}_{key}": value for key, value in measured.items()}
    for key, value in figures.items():
        print(f"{key:36} {value:12,.3f}")
    print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


def measure(task: list[str], num_servers: int, seconds: float) -> dict[str, float]:
    """Measure one learner, and a fleet that dials it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with contextlib.redirect_stdout(None):
            for args in (["authority"], ["learner", "127.0.0.1"], ["token"]):
                assert keys.main([*args, "--folder", str(folder / "keys")]) == 0
        token = ["--token_file", f"{folder}/keys/token"]
        learner = stack.enter_context(
            program("polybeast_learner", folder / "learner", *task, *token,
                    "--listen", "127.0.0.1:0", "--savedir", str(folder), "--xpid", "run",
                    "--tls_cert", f"{folder}/keys/learner.pem", "--log_interval_s", "1",
                    "--tls_key", f"{folder}/keys/learner.key", "--total_steps", "1000000000")
        )  # fmt: skip
        address = wait_for(lambda: find(r"dial in at (\S+)\.$", folder / "learner"), learner)
        relay, port = stack.enter_context(counting_relay(address))
        fleet = stack.enter_context(
            program("fleet", folder / "fleet-log", *task[:2], *token, "--savedir", str(folder),
                    "--num_servers", str(num_servers), "--connect", f"127.0.0.1:{port}",
                    "--tls_ca", f"{folder}/keys/ca.pem")
        )  # fmt: skip
        wait_for(lambda: steps_in(folder) > 64 * 16 * num_servers, learner)
        wait_for(lambda: streams_in(folder) == 2 * num_servers, learner)
        parts = {
            "server": psutil.Process(fleet.pid).children(),
            "gateway": psutil.Process(learner.pid).children(),
            "learner": [psutil.Process(learner.pid)],
        }
        before = count(folder, parts, relay)
        time.sleep(seconds)
        after = count(folder, parts, relay)
        steps = after.pop("steps") - before.pop("steps")
        figures = {"steps_per_s": steps / seconds}
        for name, value in after.items():
            figures[f"{name}_per_step"] = (value - before[name]) / steps
        for name, processes in parts.items():
            memory = sum(process.memory_full_info().uss for process in processes)
            figures[f"{name}_mib"] = memory / MIB / len(processes)
        figures["supervisor_mib"] = psutil.Process(fleet.pid).memory_full_info().uss / MIB
        return figures


def count(folder: Path, parts: dict[str, list[psutil.Process]], relay: Any) -> dict[str, float]:
    """Totals so far: steps, CPU microseconds, bytes."""
    relay.send(None)
    up, down = relay.recv()
    figures: dict[str, float] = {"steps": steps_in(folder), "bytes_up": up, "bytes_down": down}
    for name, processes in parts.items():
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        figures[f"{name}_cpu_us"] = 1e6 * cpu_s
    return figures


# ---------------------------------------------------------------------------------------- programs


@contextlib.contextmanager
def program(module: str, output: Path, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the background until the block ends."""
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", f"torchbeast.{module}", *args], stdout=file, stderr=file
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + START_S
    while not (found := condition()):
        if time.monotonic() > deadline or process.poll() is not None:
            sys.exit("The learner did not start in time.")
        time.sleep(0.2)
    return found


def find(pattern: str, path: Path) -> str:
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return found[1] if found else ""


def steps_in(folder: Path) -> int:
    """Steps that were learnt from, by the log's last row."""
    path = folder / "run/logs.csv"
    if not path.exists():
        return 0
    with path.open(newline="") as file:
        rows = [row["step"] for row in csv.DictReader(file) if row.get("step")]
    return int(rows[-1]) if rows else 0


def streams_in(folder: Path) -> int:
    path = folder / "run/connections.csv"
    if not path.exists():
        return 0
    with path.open(newline="") as file:
        return sum(int(row["streams"] or 0) for row in csv.DictReader(file))


# ------------------------------------------------------------------------------------------- relay


@contextlib.contextmanager
def counting_relay(address: str) -> Iterator[tuple[Any, int]]:
    """Run a relay; yields a pipe that answers with the bytes sent up and down, and its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=relay_bytes, args=(address, theirs), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join(START_S)


def relay_bytes(address: str, pipe: Any) -> None:
    host, _, port = address.rpartition(":")
    totals = [0, 0]

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                totals[way] += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, theirs[1], 0), copy(theirs[0], writer, 1))

    async def serve() -> None:
        server = await asyncio.start_server(join, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(tuple(totals))

    asyncio.run(serve())


if __name__ == "__main__":
    main()
