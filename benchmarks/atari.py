"""The speed of PolyBeast and MonoBeast on Pong, and the bound that their parts set here.

bound = cores / (CPU-seconds of one step in the environment + in inference + in the update), each
measured alone, between the runs, with the runs' settings and batch sizes. The busy bound is the
same with each part on all cores at once: cores that are all busy have a lower clock, and share
caches and memory. Idle is the part of the machine that was not used in the runs. Last line: JSON.

    python benchmarks/atari.py [--seconds 40] [--rounds 2]
"""

import csv
import json
import multiprocessing
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro

from libtorchbeast.groups import spec_of_group
from libtorchbeast.malloc import keep_freed_memory
from libtorchbeast.tree import map_tree
from torchbeast import monobeast, polybeast
from torchbeast.core.learner import Learner
from torchbeast.envs import make_envs
from torchbeast.models import build_model
from torchbeast.run.command_line import parse
from torchbeast.run.flags import num_cores
from torchbeast.runtime.inference_model import ActorModel

WARM_UP_S = 15.0  # time for environments to start


@dataclass(frozen=True)
class Options:
    """Measure both beasts against the sum of their parts."""

    env: str = "PongNoFrameskip-v4"
    """The environment to train on."""
    seconds: float = 40.0
    """Length of each measured run, after a warm-up."""
    rounds: int = 2
    """Number of runs of each beast, in turns."""
    args: str = ""
    """Further flags for PolyBeast."""
    mono_args: str = ""
    """Further flags for MonoBeast."""


@dataclass(frozen=True)
class Speed:
    """The result of one run."""

    sps: float
    inference_batch: float
    idle: float
    """The part of the machine that was idle."""


def measure_training(module: str, options: Options, args: list[str]) -> Speed:
    """Steps a second of a whole run, from its own log."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", module, "--env", options.env, "--savedir", folder),
                *("--xpid", "run", "--log_interval_s", "1", "--disable_cuda", *args),
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            time.sleep(WARM_UP_S)
            psutil.cpu_times_percent()
            time.sleep(options.seconds)
            idle = psutil.cpu_times_percent().idle / 100
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        with (Path(folder) / "run" / "logs.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))[:-1]
    rows = [row for row in rows if float(row["_time"]) > float(rows[-1]["_time"]) - options.seconds]
    first, last = rows[0], rows[-1]
    steps = int(last["step"]) - int(first["step"])
    batches = [float(size) for row in rows if (size := row.get("inference_batch_size"))]
    return Speed(
        steps / (float(last["_time"]) - float(first["_time"])),
        statistics.mean(batches) if batches else 0.0,
        idle,
    )


def cpu_seconds_a_call(call: Callable[[], Any], seconds: float = 4.0) -> float:
    """CPU-seconds that a call takes in all threads of this process, after a warm-up."""
    for _ in range(3):
        call()
    calls, cpu, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        calls += 1
    return (time.process_time() - cpu) / calls


def measure_parts(
    flags: polybeast.Flags | monobeast.Flags, inference_batch: int
) -> dict[str, float]:
    """CPU-seconds of a step in each part, measured alone."""
    keep_freed_memory()
    E, T, B = flags.envs_per_actor, flags.unroll_length, flags.batch_size
    envs = make_envs(flags.env_options, E, seed=0)
    row = envs.reset()
    spec = spec_of_group(envs, row)
    num_actions = spec.num_actions
    model = build_model(flags, spec)
    generator = torch.Generator().manual_seed(0)

    def rows(*sizes: int) -> Any:
        """Rows [*sizes, ...] of copies of the first environment's."""
        return map_tree(
            lambda x: torch.from_numpy(x[:1]).expand(*sizes, *x.shape[1:]).contiguous(), row
        )

    def step_envs() -> None:
        envs.step(torch.randint(num_actions, (E,), generator=generator).numpy())

    inputs = rows(1, inference_batch)
    state = monobeast.initial_state(model, inference_batch)
    is_poly = isinstance(flags, polybeast.Flags)  # MonoBeast's actors always use float32
    agent = ActorModel(model, torch.device("cpu"), autocast=flags.autocast if is_poly else "none")

    def infer() -> None:
        with torch.inference_mode(), agent.newest() as (acting, _):
            acting(inputs, state)

    batch = rows(T + 1, B)
    batch["done"] = torch.zeros(T + 1, B, dtype=torch.bool)
    batch["action"] = torch.randint(num_actions, (T, B), generator=generator)
    batch["policy_logits"] = torch.zeros(T, B, num_actions)
    batch["version"] = torch.zeros(T, B)
    learner = Learner(model, flags, torch.device("cpu"))
    states = monobeast.initial_state(model, B)

    torch.set_num_threads(1)
    environment_s = cpu_seconds_a_call(step_envs) / E
    inference_s = cpu_seconds_a_call(infer) / inference_batch
    torch.set_num_threads(flags.learner_cpu_threads)
    update_s = cpu_seconds_a_call(lambda: learner.step(dict(batch), states)) / (T * B)
    envs.close()
    return {"environment_s": environment_s, "inference_s": inference_s, "update_s": update_s}


def measure_busy_parts(
    flags: polybeast.Flags | monobeast.Flags, inference_batch: int
) -> dict[str, float]:
    """`measure_parts` in as many processes at once as there are cores; means over them."""
    n = num_cores()
    with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
        return mean_parts(list(pool.map(measure_parts, [flags] * n, [inference_batch] * n)))


def bound_of(parts: list[dict[str, float]]) -> float:
    """The bound on steps a second that the parts set."""
    return num_cores() / sum(mean_parts(parts).values())


def mean_parts(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(p[name] for p in parts) for name in parts[0]}


def main(options: Options) -> None:
    poly_args, mono_args = options.args.split(), options.mono_args.split()
    poly_flags = parse(polybeast.Flags, ["--env", options.env, *poly_args])
    mono_flags = parse(monobeast.Flags, ["--env", options.env, *mono_args])
    poly, mono, poly_parts, busy_parts, mono_parts = [], [], [], [], []
    for _ in range(options.rounds):
        poly.append(measure_training("torchbeast.polybeast", options, poly_args))
        batch = round(poly[-1].inference_batch)
        poly_parts.append(measure_parts(poly_flags, batch))
        busy_parts.append(measure_busy_parts(poly_flags, batch))
        mono.append(measure_training("torchbeast.monobeast", options, mono_args))
        mono_parts.append(measure_parts(mono_flags, mono_flags.envs_per_actor))
        print(f"PolyBeast {poly[-1].sps:.0f} SPS, MonoBeast {mono[-1].sps:.0f} SPS", flush=True)
    sps, mono_sps = (statistics.mean(run.sps for run in runs) for runs in (poly, mono))
    parts, busy = mean_parts(poly_parts), mean_parts(busy_parts)
    bound, busy_bound, mono_bound = map(bound_of, (poly_parts, busy_parts, mono_parts))
    idle = statistics.mean(run.idle for run in poly)
    for name, value in parts.items():
        print(
            f"{name.removesuffix('_s')}: {1e6 * value:.0f} us of CPU a step alone, "
            f"{1e6 * busy[name]:.0f} with all cores busy"
        )
    print(f"inference saw {statistics.mean(run.inference_batch for run in poly):.1f} rows a batch")
    print(f"PolyBeast {sps:.0f} SPS, bound {bound:.0f} SPS on {num_cores()} cores")
    print(f"with all cores busy {busy_bound:.0f} SPS; idle {idle:.1%}")
    print(f"MonoBeast {mono_sps:.0f} SPS, bound {mono_bound:.0f} SPS")
    print(
        json.dumps(
            {
                "sps": round(sps, 1),
                "bound_sps": round(bound, 1),
                "bound_ratio": round(sps / bound, 3),
                "busy_bound_sps": round(busy_bound, 1),
                "busy_bound_ratio": round(sps / busy_bound, 3),
                "idle": round(idle, 3),
                "vs_monobeast": round(sps / mono_sps, 3),
                "monobeast_sps": round(mono_sps, 1),
                "monobeast_bound_ratio": round(mono_sps / mono_bound, 3),
                **{name: round(value, 7) for name, value in parts.items()},
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
