"""Actors that carry the model, and remote inference, over links of given latency and bandwidth.

Two network namespaces are the hosts. This program is the wire between them, with a TUN device at
each end: it delays each packet and limits the bits per second (so that it also works on kernels
without tc's netem). One learner with `Mock` frames, 4x84x84, and on the other host 16 environments
in one process: first `polybeast_env --connect`, which asks for each action, then `polybeast_actor`.
Latency is that of a round trip. Then both learn Catch. Needs root and iproute2.
"""

import contextlib
import csv
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

LATENCIES_MS = (0, 20, 100)
RATES_MBIT = (100, 10)
WINDOW_S = {100: 8.0, 10: 21.0}  # batches are rare over a slow link
SMALL_BATCHES = ("--unroll_length", "20", "--batch_size", "8", "--num_passes", "1",
                 "--num_minibatches", "1", "--clip_ratio", "None")  # fmt: skip
SETTLE_S = 3.0
NUM_ENVS = 16
CATCH_ENVS = 32
CATCH_LINK = (20, 100)  # ms, Mbit/s
CATCH_S = 150.0
START_S = 120.0
COMMAND_S = 30.0
MTU = 9000  # large, as each packet costs this program some time
MAX_QUEUE_S = 0.2  # packets that would wait longer are lost, as at any router
LEARNER, CLIENTS = "10.77.0.1", "10.77.0.2"
ADDRESS = f"{LEARNER}:4242"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
CLONE_NEWNET = 0x40000000


# ----------------------------------------------------------------------------------------- the wire


class Direction:
    """One direction of the wire: packets on their way from one device to the other."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._target = target
        self._packets: deque[tuple[float, bytes]] = deque()  # with the time when each arrives
        self._free_at = 0.0  # when the wire can take the next one
        self.num_bytes = 0

    def take(self, now: float, delay_s: float, bits_per_s: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, MTU + 64)
                start = max(now, self._free_at)
                if start - now > MAX_QUEUE_S:
                    continue
                self._free_at = start + 8 * len(packet) / bits_per_s
                self._packets.append((self._free_at + delay_s, packet))
                self.num_bytes += len(packet)

    def give(self, now: float) -> float:
        """Deliver the packets that are due; returns the seconds until the next one is."""
        while self._packets and self._packets[0][0] <= now:
            with contextlib.suppress(OSError):  # a device that is down loses packets
                os.write(self._target, self._packets[0][1])
            self._packets.popleft()
        return self._packets[0][0] - now if self._packets else 1.0


def run_wire(*hosts: str) -> None:
    """The wire's process: reads `{"latency_ms": ..., "mbit": ...}` from stdin, and answers with the
    bytes so far in each direction."""
    ends = [open_tun(host) for host in hosts]
    directions = [Direction(ends[0], ends[1]), Direction(ends[1], ends[0])]
    print("ready", flush=True)
    delay_s, bits_per_s, wait_s = 0.0, 1e9, 1.0
    while True:
        readable, _, _ = select.select([*ends, sys.stdin], [], [], max(0.0, wait_s))
        now = time.monotonic()
        for direction in directions:
            direction.take(now, delay_s, bits_per_s)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            if change := json.loads(line):
                delay_s, bits_per_s = change["latency_ms"] / 2000, 1e6 * change["mbit"]
            print(json.dumps([direction.num_bytes for direction in directions]), flush=True)
        wait_s = min(direction.give(time.monotonic()) for direction in directions)


def open_tun(host: str) -> int:
    """Make the device `wire0` in a namespace; returns its file descriptor."""
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {host}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"wire0", IFF_TUN | IFF_NO_PI))
    return fd


class Wire:
    """Starts and controls the wire's process."""

    def __init__(self, *hosts: str) -> None:
        command = [sys.executable, __file__, "--wire", *hosts]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the wire cannot be made"

    def set(self, latency_ms: float, mbit: float) -> None:
        self._say({"latency_ms": latency_ms, "mbit": mbit})

    def read(self) -> list[int]:
        """The bytes so far from the learner, and to it."""
        return self._say({})

    def _say(self, message: dict[str, float]) -> list[int]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(message), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait(COMMAND_S)


# ---------------------------------------------------------------------------------------- the hosts


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, timeout=COMMAND_S)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str, Wire]]:
    """Yield the learner's namespace, the clients', and the wire between them."""
    names = [f"torchbeast-links-{who}-{os.getpid()}" for who in ("learner", "clients")]
    with contextlib.ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        wire = Wire(*names)
        stack.callback(wire.close)
        for name, address in zip(names, (LEARNER, CLIENTS), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire0")
            ip("-n", name, "link", "set", "wire0", "mtu", str(MTU), "up")
        yield names[0], names[1], wire


@contextlib.contextmanager
def program(host: str, log: Path, module: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of our programs on a host until the block ends."""
    command = ["ip", "netns", "exec", host, sys.executable, "-m", f"torchbeast.{module}", *args]
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(COMMAND_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if sys.exc_info()[0] is not None:
                print(log.read_text()[-3000:], file=sys.stderr)


def start_learner(host: str, folder: Path, xpid: str, env: str, *flags: str) -> Any:
    return program(
        host, folder / f"{xpid}.log", "polybeast_learner", "--env", env, "--listen", ADDRESS,
        "--insecure", "--savedir", str(folder), "--xpid", xpid, "--total_steps", "1000000000",
        "--disable_checkpoint", "--log_interval_s", "0.2", *flags,
    )  # fmt: skip


def start_clients(host: str, folder: Path, how: str, env: str, num_envs: int) -> Any:
    kind, *flags = how.split()
    counts = {
        "polybeast_env": ("--num_servers", "1", "--envs_per_server", str(num_envs)),
        "polybeast_actor": ("--num_actors", "1", "--envs_per_actor", str(num_envs)),
    }
    dial = ("--connect", ADDRESS, "--insecure", "--env", env)
    return program(host, folder / "clients.log", kind, *dial, *counts[kind], *flags)


def read_log(folder: Path, xpid: str) -> list[dict[str, str]]:
    path = folder / xpid / "logs.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        time.sleep(0.1)


# ------------------------------------------------------------------------------------ measurements


def measure_link(wire: Wire, folder: Path, xpid: str, link: tuple[int, int]) -> dict[str, float]:
    """Steps a second and bytes a step over one link."""
    wire.set(*link)
    time.sleep(SETTLE_S)
    start, before = time.time(), wire.read()
    time.sleep(WINDOW_S[link[1]])
    seconds, after = time.time() - start, wire.read()
    rows = [row for row in read_log(folder, xpid) if float(row["_time"]) >= start]
    # Steps come in batches, rarely over a slow link: the slope of a line through all counts.
    times = [float(row["_time"]) for row in rows]
    rate = float(np.polyfit(np.subtract(times, start), [int(row["step"]) for row in rows], 1)[0])
    down, up = (b - a for a, b in zip(before, after, strict=True))
    lags = [float(row["policy_lag"]) for row in rows if row.get("policy_lag")]
    return {
        "steps_per_s": rate,
        "bytes_per_step_up": up / (rate * seconds),
        "bytes_per_step_down": down / (rate * seconds),
        "policy_lag": sum(lags) / max(1, len(lags)),
    }


def measure_catch(hosts: tuple[str, str, Wire], folder: Path, how: str) -> dict[str, float]:
    """Seconds and steps until Catch is learnt."""
    learner, clients, wire = hosts
    wire.set(*CATCH_LINK)
    xpid = f"catch-{how.split()[0]}"

    def is_learnt() -> bool:
        rows = [row for row in read_log(folder, xpid) if row.get("mean_episode_return")]
        if not rows or int(rows[-1].get("episodes") or 0) < 100:
            return False
        return float(rows[-1]["mean_episode_return"]) >= 0.9

    with (
        start_learner(learner, folder, xpid, "Catch"),
        start_clients(clients, folder, how, "Catch", CATCH_ENVS),
    ):
        wait_for(lambda: read_log(folder, xpid), START_S, "first step of Catch")
        start = time.monotonic()
        wait_for(is_learnt, CATCH_S, "mean return of 0.9 in Catch")
        seconds = time.monotonic() - start
        return {"seconds": seconds, "steps": float(read_log(folder, xpid)[-1]["step"])}


def name_of(kind: str, link: tuple[int, int]) -> str:
    return f"{kind} {link[0]} ms {link[1]} Mbit/s"


def main() -> None:
    if shutil.which("ip") is None or os.geteuid() != 0:
        print(json.dumps({"skipped": "network namespaces need root and iproute2"}))
        return
    figures: dict[str, dict[str, float]] = {}
    links = [(latency, rate) for rate in RATES_MBIT for latency in LATENCIES_MS]
    bf16 = "polybeast_actor --weights_dtype bf16"
    ways = [("inference", "polybeast_env", links), ("actors", "polybeast_actor", links),
            ("actors bf16", bf16, [(100, 10)])]  # fmt: skip
    with tempfile.TemporaryDirectory() as name, two_hosts() as hosts:
        folder, (learner, clients, wire) = Path(name), hosts
        with start_learner(learner, folder, "mock", "Mock", *SMALL_BATCHES):
            for kind, how, chosen in ways:
                wire.set(0, 1000)
                with start_clients(clients, folder, how, "Mock", NUM_ENVS):
                    num_before = len(read_log(folder, "mock"))
                    wait_for(lambda n=num_before: len(read_log(folder, "mock")) > n + 5, START_S,
                             "step of Mock")  # fmt: skip
                    for link in chosen:
                        figures[name_of(kind, link)] = measure_link(wire, folder, "mock", link)
                        show(name_of(kind, link), figures)
        for kind, how in (("inference", "polybeast_env"), ("actors", "polybeast_actor")):
            figures[f"{kind} Catch"] = measure_catch(hosts, folder, how)
            show(f"{kind} Catch", figures)
    for link in links:
        actors, inference = (figures[name_of(kind, link)] for kind in ("actors", "inference"))
        ratio = actors["steps_per_s"] / max(inference["steps_per_s"], 1e-9)
        figures[name_of("actors against inference", link)] = {"steps_per_s": ratio}
    rounded = {k: {n: round(v, 2) for n, v in f.items()} for k, f in figures.items()}
    print(json.dumps(rounded))


def show(name: str, figures: dict[str, dict[str, float]]) -> None:
    shown = "  ".join(f"{key} {value:,.1f}" for key, value in figures[name].items())
    print(f"{name:32} {shown}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--wire"]:
        run_wire(*sys.argv[2:])
    else:
        main()
