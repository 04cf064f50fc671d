"""A learner is restarted under many clients over TLS: how long until all of them play again?

Clients are light: many streams in a process, each with a TLS connection and an environment of its
own. The learner ends as it does after SIGTERM, and listens again at the same port; the time runs
from then until each stream has had an action. Last line: JSON; if not all play in time,
`seconds_until_all_play` is null and the exit code 1.

    python benchmarks/herd.py [--clients 1000]
"""

import contextlib
import json
import logging
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import tyro

import libtorchbeast
from libtorchbeast import Security
from libtorchbeast.groups import Group
from libtorchbeast.rpc.env_client import EnvironmentClient
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from libtorchbeast.shared_lanes import allow_descriptors
from libtorchbeast.sync_envs import SyncEnvs
from torchbeast import keys

T = 20
STEP_S = 5.0  # time between two answers to an environment: reconnecting is measured, not playing
POLL_S = 0.02
SAY_S = 10.0  # between two messages on how many play
END_S = 30.0  # time for threads and processes to end


@dataclass(frozen=True)
class Options:
    """Measure how clients come back."""

    clients: int = 1000
    """Number of clients, each a stream of its own."""
    processes: int = 2
    """Number of processes that the clients are in."""
    down_s: float = 3.0
    """Seconds between the learner's end and its next start."""
    timeout_s: float = 200.0
    """Seconds within which all must play, after each start; else the number that do is printed."""


class Still:
    """An environment that costs nothing."""

    observation_space = action_space = None

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        pass


def make_group() -> Group:
    return Group(lambda seed: SyncEnvs(Still, 1), seed=0)


def run_clients(address: str, security: Security, number: int) -> None:
    logging.disable()
    allow_descriptors(4 * number)
    EnvironmentClient([make_group] * number, address, security=security).run()


class Learner:
    """An agent that answers now and then, and a learner that discards rollouts."""

    def __init__(self, address: str, security: Security) -> None:
        self.played: set[int] = set()  # environments that have had an action
        self._over = threading.Event()
        self._queue = libtorchbeast.BatchingQueue(minimum_batch_size=1, maximum_batch_size=1024)
        self._batcher = libtorchbeast.DynamicBatcher(maximum_batch_size=1024, timeout_ms=10)
        self._pool = libtorchbeast.ActorPool(T, self._queue, self._batcher)
        self.gateways = Gateways(GatewaysConfig(listen=[address], security=security))
        self.gateways.open()
        self.gateways.start(self._pool.add_lane)
        targets = (self._infer, self._take, self._poll, self._pool.run)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End as a run does that was asked to stop."""
        self._over.set()
        self._queue.close()
        self._batcher.close()
        for thread in self._threads:
            thread.join(END_S)
            if thread.is_alive():
                say(f"A thread of the learner ({thread.name}) has not ended in {END_S:.0f} s")
        self.gateways.close()

    def wait_for(self, number: int, timeout_s: float) -> float | None:
        """Wait until so many environments play; returns the seconds, or None after the timeout."""
        start = say_at = time.monotonic()
        while len(self.played) < number:
            now = time.monotonic()
            if now > say_at + SAY_S or now > start + timeout_s:
                say_at = now
                say(f"{self.describe()} after {now - start:.0f} s")
            if now > start + timeout_s:
                return None
            time.sleep(POLL_S)
        return time.monotonic() - start

    def describe(self) -> str:
        """How many clients play and are connected, in words."""
        clients = self.gateways.clients
        counts = {name: sum(getattr(c, name) for c in clients) for name in ("refused", "lost")}
        return (
            f"{len(self.played)} have played, {self.gateways.num_streams} are connected, "
            f"{counts['refused']} were refused and {counts['lost']} lost, "
            f"{self.gateways.supervisor.num_restarts} restarts of the gateway"
        )

    def _infer(self) -> None:
        for batch in self._batcher:
            row, state = batch.get_inputs()
            answer = {"action": torch.zeros_like(row["source"])}
            batch.set_outputs((answer, state))
            self.played.update(row["source"].flatten().tolist())
            self._over.wait(STEP_S * row["source"].numel() / max(1, len(self.played)))

    def _take(self) -> None:
        for _ in self._queue:
            pass

    def _poll(self) -> None:
        while not self._over.wait(POLL_S):
            self.gateways.poll()


def say(text: str) -> None:
    print(text, flush=True)


def make_keys(folder: Path) -> tuple[Security, Security]:
    """Make keys; returns the Security of the learner and of the clients."""
    for command in (["authority"], ["learner", "127.0.0.1"], ["token"]):
        if keys.main([*command, "--folder", str(folder)]) != 0:
            raise RuntimeError(f"keys {command[0]} failed.")
    token = folder / "token"
    ours = Security(
        tls_cert=folder / "learner.pem", tls_key=folder / "learner.key", token_file=token
    )
    return ours, Security(tls_ca=folder / "ca.pem", token_file=token)


@contextlib.contextmanager
def herd(options: Options, address: str, security: Security) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    share = -(-options.clients // options.processes)
    numbers = [min(share, options.clients - i) for i in range(0, options.clients, share)]
    processes = [
        context.Process(target=run_clients, args=(address, security, number), daemon=True)
        for number in numbers
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join(END_S)


def cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def main(options: Options) -> int:
    logging.getLogger("torchbeast").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = make_keys(Path(folder))
        first = Learner("127.0.0.1:0", ours)
        address = first.gateways.listening[0]
        with herd(options, address, theirs):
            try:
                seconds = first.wait_for(options.clients, options.timeout_s)
                if seconds is not None:
                    say(f"{options.clients} play after {seconds:.1f} s, their start included")
            finally:
                first.close()
            time.sleep(options.down_s)
            again = Learner(address, ours)
            try:
                seconds = again.wait_for(options.clients, options.timeout_s)
                gateway_cpu_s = cpu_s(again.gateways.pids)
                time.sleep(1.0)  # for the gateway's last report
                refused = sum(client.refused for client in again.gateways.clients)
            finally:
                again.close()
    figures = {
        "clients": options.clients,
        "seconds_until_all_play": seconds and round(seconds, 2),
        "gateway_cpu_s": round(gateway_cpu_s, 2),
        "refused": refused,
    }
    print(json.dumps(figures))
    return int(seconds is None)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
