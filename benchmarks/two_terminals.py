"""Environment servers and learner as separate programs on one machine, as TorchBeast's users start
them, compared with the learner's own workers.

Mock frames (4x84x84), a model that reads a few pixels, a learner that takes every rollout (T=20).
First with 32 environments a server, in turns with as many in workers; then with one environment in
each of 16 servers: over unix sockets, where lanes are handed over, and over gRPC on loopback. Last
line: JSON.

    python benchmarks/two_terminals.py [--seconds 5] [--rounds 3]
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import tyro

import libtorchbeast
from libtorchbeast.env_workers import Workers, WorkersConfig
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from libtorchbeast.specs import ArraySpec, discrete

NUM_ACTIONS = 6
SPEC = Spec(ArraySpec("uint8", (4, 84, 84), 0, 255), discrete(NUM_ACTIONS))
T = 20
ENVS_PER_SERVER = 32
NUM_SINGLE = 16
START_S = 120.0
WARM_UP_S = 2.0


@dataclass(frozen=True)
class Options:
    """Measure environments and learner as separate programs."""

    seconds: float = 5.0
    """Length of each measurement, after a warm-up."""
    rounds: int = 3
    """Number of measurements of each arrangement, in turns."""
    num_servers: int = max(2, os.cpu_count() or 2)
    """Processes in the arrangement with 32 environments each."""


@dataclass(frozen=True)
class Figures:
    """The result of one measurement."""

    steps_per_s: float
    cpu_us_per_step: float


class Learner:
    """An agent that reads a few pixels, and a learner that discards rollouts."""

    def __init__(self, batch_size: int) -> None:
        self._queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=2 * batch_size,
        )
        self._batcher = libtorchbeast.DynamicBatcher(maximum_batch_size=1024)
        self.sources: set[int] = set()  # the environments that have sent a rollout
        self.pool = libtorchbeast.ActorPool(T, self._queue, self._batcher)
        self._threads = [threading.Thread(target=f) for f in (self._infer, self._learn)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._queue.close()
        self._batcher.close()
        self.pool.run()
        for thread in self._threads:
            thread.join(START_S)

    def _infer(self) -> None:
        torch.set_num_threads(1)
        for batch in self._batcher:
            row, state = batch.get_inputs()
            action = row["frame"][:, :, 0, 0, 0].long() % NUM_ACTIONS
            batch.set_outputs(({"action": action}, state))

    def _learn(self) -> None:
        for (rows, _), _ in self._queue:
            self.sources.update(rows["source"][0].tolist())


def measure(learner: Learner, poll: Callable[[], None], num_envs: int, seconds: float) -> Figures:
    """Steps a second of the learner's environments, and the CPU time of all processes."""
    deadline = time.monotonic() + START_S
    while len(learner.sources) < num_envs:
        if time.monotonic() > deadline:
            sys.exit("The environments did not start in time.")
        poll()
        time.sleep(0.05)
    wait(poll, WARM_UP_S)
    steps, cpu_s, start = learner.pool.count(), family_cpu_s(), time.monotonic()
    wait(poll, seconds)
    steps = learner.pool.count() - steps
    return Figures(
        steps / (time.monotonic() - start), 1e6 * (family_cpu_s() - cpu_s) / max(1, steps)
    )


def wait(poll: Callable[[], None], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        poll()
        time.sleep(0.1)


def family_cpu_s() -> float:
    """CPU-seconds of this process and of all that it has started."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def measure_lanes(options: Options) -> Figures:
    """Measure with the learner's own workers, as in `polybeast`."""
    learner = Learner(batch_size=ENVS_PER_SERVER // 2)
    workers = Workers(
        WorkersConfig(
            factory="torchbeast.envs:make_group",
            factory_options={"env": "Mock"},
            spec=SPEC,
            num_workers=options.num_servers,
            num_groups=2 * options.num_servers,
            envs_per_group=ENVS_PER_SERVER // 2,
            seed=0,
        )
    )
    for lane in workers.lanes:
        learner.pool.add_lane(lane)
    try:
        num_envs = options.num_servers * ENVS_PER_SERVER
        return measure(learner, workers.poll, num_envs, options.seconds)
    finally:
        learner.close()
        workers.close()


def measure_servers(basename: str, num_servers: int, num_envs: int, seconds: float) -> Figures:
    """Measure with `polybeast_env` as a separate program."""
    with servers(basename, num_servers, num_envs) as addresses:
        learner = Learner(batch_size=max(1, min(16, num_envs // 2)))
        gateways = Gateways(GatewaysConfig(server_addresses=addresses), SPEC)
        gateways.open()
        gateways.start(learner.pool.add_lane)
        try:
            return measure(learner, gateways.poll, num_servers * num_envs, seconds)
        finally:
            learner.close()
            gateways.close()


@contextlib.contextmanager
def servers(basename: str, num_servers: int, num_envs: int) -> Iterator[list[str]]:
    """Run `polybeast_env`; yields the addresses of its servers."""
    from libtorchbeast.rpc.address import server_address

    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torchbeast.polybeast_env", "--env", "Mock"),
            *("--pipes_basename", basename, "--num_servers", str(num_servers)),
            *("--envs_per_server", str(num_envs)),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield [server_address(basename, i) for i in range(num_servers)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)


def free_ports(number: int) -> int:
    """The first of so many successive ports that are free."""
    for first in range(42000, 60000, number):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + number):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    sys.exit("There are not enough free ports.")


def main(options: Options) -> None:
    results: dict[str, list[Figures]] = {"lanes": [], "servers": [], "single": [], "tcp": []}
    with tempfile.TemporaryDirectory() as folder:
        unix = f"unix:{folder}/server"
        tcp = f"127.0.0.1:{free_ports(NUM_SINGLE)}"
        arrangements: dict[str, Callable[[], Figures]] = {
            "lanes": lambda: measure_lanes(options),
            "servers": lambda: measure_servers(
                unix, options.num_servers, ENVS_PER_SERVER, options.seconds
            ),
            "single": lambda: measure_servers(unix, NUM_SINGLE, 1, options.seconds),
            "tcp": lambda: measure_servers(tcp, NUM_SINGLE, 1, options.seconds),
        }
        for _ in range(options.rounds):
            for name, arrangement in arrangements.items():
                figures = arrangement()
                results[name].append(figures)
                print(
                    f"{name:8} {figures.steps_per_s:10,.0f} steps/s "
                    f"{figures.cpu_us_per_step:8.1f} us of CPU a step",
                    flush=True,
                )

    def median(name: str, of: Callable[[Figures], float]) -> float:
        return statistics.median(of(figures) for figures in results[name])

    def ratio(a: str, b: str) -> float:
        pairs = zip(results[a], results[b], strict=True)
        return statistics.median(x.steps_per_s / y.steps_per_s for x, y in pairs)

    def speed(figures: Any) -> float:
        return figures.steps_per_s

    print(
        json.dumps(
            {
                "steps_per_s": round(median("servers", speed)),
                "vs_lanes": round(ratio("servers", "lanes"), 3),
                "lanes_steps_per_s": round(median("lanes", speed)),
                "single_steps_per_s": round(median("single", speed)),
                "single_vs_grpc": round(ratio("single", "tcp"), 2),
                "single_cpu_us_per_step": round(median("single", lambda f: f.cpu_us_per_step), 1),
                "single_tcp_steps_per_s": round(median("tcp", speed)),
                "single_tcp_cpu_us_per_step": round(median("tcp", lambda f: f.cpu_us_per_step), 1),
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
