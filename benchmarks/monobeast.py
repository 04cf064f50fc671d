"""MonoBeast's speed on Pong next to what its parts alone would allow on this machine.

bound = cores / (CPU-seconds of one step in the environment + in inference + in the update), each
measured alone, before and after the run, at the batch sizes in use. Last line: JSON.

    python benchmarks/monobeast.py [--seconds 60] [--env ...]
"""

import csv
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from torchbeast import monobeast
from torchbeast.core.flags import default_flags, num_cores
from torchbeast.core.learner import Learner
from torchbeast.core.memory import keep_freed_memory
from torchbeast.core.tree import map_tree
from torchbeast.envs import make_envs

WARM_UP_S = 15.0


@dataclass(frozen=True)
class Options:
    """Measure MonoBeast against the sum of its parts."""

    env: str = "PongNoFrameskip-v4"
    """What to train on."""
    seconds: float = 60.0
    """Length of the measured run, after a warm-up."""


def cpu_seconds_a_call(call: Callable[[], Any], seconds: float = 4.0) -> float:
    """CPU time of all threads of this process, after a warm-up."""
    for _ in range(3):
        call()
    calls, cpu, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        call()
        calls += 1
    return (time.process_time() - cpu) / calls


def measure_parts(flags: monobeast.Flags) -> dict[str, float]:
    """CPU-seconds a step of each part, alone."""
    E, T, B = flags.envs_per_actor, flags.unroll_length, flags.batch_size
    envs = make_envs(flags.env_options, E, seed=0)
    row = envs.reset()
    model = monobeast.build_model(flags, row, envs.num_actions)
    state = monobeast.initial_state(model, E)
    inputs = map_tree(lambda x: torch.from_numpy(x).unsqueeze(0), row)
    generator = torch.Generator().manual_seed(0)

    def step_envs() -> None:
        envs.step(torch.randint(envs.num_actions, (E,), generator=generator).numpy())

    def infer() -> None:
        with torch.inference_mode():
            model(inputs, state)

    def field(x: Any) -> torch.Tensor:
        tensor = torch.from_numpy(x[:1])
        return tensor.expand(T + 1, B, *tensor.shape[1:]).contiguous()

    batch = map_tree(field, row)
    batch["done"] = torch.zeros(T + 1, B, dtype=torch.bool)
    batch["action"] = torch.randint(envs.num_actions, (T, B), generator=generator)
    batch["policy_logits"] = torch.zeros(T, B, envs.num_actions)
    batch["version"] = torch.zeros(B)
    learner = Learner(model, flags, torch.device("cpu"))
    states = monobeast.initial_state(model, B)

    torch.set_num_threads(1)
    environment_s = cpu_seconds_a_call(step_envs) / E
    inference_s = cpu_seconds_a_call(infer) / E
    torch.set_num_threads(flags.learner_cpu_threads)
    update_s = cpu_seconds_a_call(lambda: learner.step(batch, states)) / (T * B)
    envs.close()
    return {"environment_s": environment_s, "inference_s": inference_s, "update_s": update_s}


def measure_training(flags: monobeast.Flags, seconds: float) -> float:
    """Steps a second of a whole run, from its own log."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torchbeast.monobeast", "--env", flags.env),
                *("--savedir", folder, "--xpid", "run", "--log_interval_s", "1", "--disable_cuda"),
            ]
        )
        try:
            time.sleep(WARM_UP_S + seconds)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        with (Path(folder) / "run" / "logs.csv").open(newline="") as file:
            rows = [(float(row["_time"]), int(row["step"])) for row in csv.DictReader(file)]
    rows = [row for row in rows[:-1] if row[0] > rows[-1][0] - seconds]
    return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])


def main(options: Options) -> None:
    keep_freed_memory()
    flags = default_flags(monobeast.Flags, options.env)
    before = measure_parts(flags)
    sps = measure_training(flags, options.seconds)
    after = measure_parts(flags)
    parts = {name: statistics.mean([before[name], after[name]]) for name in before}
    for name, value in parts.items():
        print(f"{name.removesuffix('_s')}: {1e6 * value:.0f} us of CPU a step")
    bound_sps = num_cores() / sum(parts.values())
    print(f"measured {sps:.0f} SPS, bound {bound_sps:.0f} SPS on {num_cores()} cores")
    print(
        json.dumps(
            {
                "sps": round(sps, 1),
                "bound_sps": round(bound_sps, 1),
                "bound_ratio": round(sps / bound_sps, 3),
                **{name: round(value, 7) for name, value in parts.items()},
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
