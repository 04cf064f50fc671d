"""What more learners cost: CPU time and bytes of updates with 1, 2 and 4 ranks.

Each rank has batches of its own, so that N ranks learn from N times the steps. Two settings: frames
of Atari with one step of the optimizer for each batch, and small vectors with the default of 64. As
many independent learners at the same time show how much of the cost is due to the machine. Bytes
are those that a rank receives, counted by the kernel. DistributedDataParallel measures how long the
exchange of gradients takes, waiting included, and how much of it overlaps with the backward pass.
Last line: JSON.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from libtorchbeast.malloc import keep_freed_memory
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from torchbeast.core.ranks import Ranks
from torchbeast.run.flags import TrainingFlags, with_values
from torchbeast.run.recipes import VECTOR
from torchbeast.run.signals import StopRequest
from torchbeast.run.training import build_learner
from torchbeast.runtime.distributed import join_ranks

A = 6
SIZES = (1, 2, 4)
TIMEOUT_S = 600.0
OVERLAP = ("buckets", "backward_ms", "gradients_ms", "overlap_ms")
SETTINGS: dict[str, tuple[Spec, TrainingFlags, int]] = {  # spec, flags, number of updates
    "frames": (
        Spec(ArraySpec("uint8", (4, 84, 84), 0, 255), discrete(A)),
        TrainingFlags(reward_clipping="abs_one"),
        12,
    ),
    "vectors": (
        Spec(ArraySpec("float32", (8,)), discrete(A)),
        with_values(TrainingFlags(), "recipe", VECTOR),
        6,
    ),
}


def make_batch(spec: Spec, flags: TrainingFlags) -> dict[str, Any]:
    T, B = flags.unroll_length, flags.batch_size
    frame: ArraySpec = spec.observation
    frames = torch.randint(256, (T + 1, B, *frame.shape))
    return {
        "frame": frames.to(getattr(torch, frame.dtype)),
        "reward": torch.randn(T + 1, B),
        "done": torch.zeros(T + 1, B, dtype=torch.bool),
        "truncated": torch.zeros(T + 1, B, dtype=torch.bool),
        "episode_step": torch.ones(T + 1, B, dtype=torch.int32),
        "episode_return": torch.zeros(T + 1, B),
        "last_action": torch.zeros(T + 1, B, dtype=torch.int64),
        "action": torch.randint(A, (T, B)),
        "policy_logits": torch.zeros(T, B, A),
    }


def bytes_received() -> int:
    """Bytes received by all TCP connections of this process, from the kernel's `tcp_info`."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("Q", info, 128)[0]
    return total


class Overlap:
    """Keeps the wrapped loss of `ranks`, to ask it how communication and computation overlap."""

    def __init__(self, ranks: Ranks) -> None:
        self._wrap = ranks.wrap
        self._wrapped: Any = None
        ranks.wrap = self.wrap  # type: ignore[method-assign]

    def wrap(self, loss: nn.Module, device: Any) -> nn.Module:
        self._wrapped = self._wrap(loss, device)
        return self._wrapped

    def figures(self) -> dict[str, float]:
        """Means over the backward passes that PyTorch samples: the first ten, and each 100th."""
        if not isinstance(self._wrapped, nn.parallel.DistributedDataParallel):
            return {}
        data = self._wrapped._get_ddp_logging_data()
        return {
            "buckets": float(data["num_buckets_reduced"]),
            "backward_ms": data["avg_backward_compute_time"] / 1e6,
            "gradients_ms": data["avg_backward_comm_time"] / 1e6,
            "overlap_ms": data["avg_backward_compute_comm_overlap_time"] / 1e6,
        }


def measure(name: str, ranks: Ranks) -> dict[str, float]:
    """Measure this rank's cost, for each of its steps or updates."""
    spec, flags, num_updates = SETTINGS[name]
    torch.manual_seed(ranks.rank)
    overlap = Overlap(ranks)
    learner = build_learner(flags, spec, torch.device("cpu"), ranks)
    batch = make_batch(spec, flags)
    learner.step(dict(batch), ())
    received, cpu_s, at = bytes_received(), time.process_time(), time.monotonic()
    for _ in range(num_updates):
        learner.step(dict(batch), ())
    steps = num_updates * flags.unroll_length * flags.batch_size
    return {
        "cpu_us_a_step": 1e6 * (time.process_time() - cpu_s) / steps,
        "bytes_an_update": (bytes_received() - received) / num_updates,
        "bytes_a_second": (bytes_received() - received) / (time.monotonic() - at),
        "model_bytes": sum(4.0 * p.numel() for p in learner.model.parameters()),
        **overlap.figures(),
    }


def run_rank() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    with StopRequest() as stop, join_ranks(stop, torch.device("cpu")) as ranks:
        print(json.dumps({name: measure(name, ranks) for name in SETTINGS}))


def run_ranks(size: int, together: bool) -> dict[str, dict[str, float]]:
    """Run ranks of one run, or as many independent learners; returns means over them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                **{key: str(value) for key, value in place.items()},
                **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
                **({"MASTER_ADDR": "127.0.0.1"} if together else {}),
            },
        )
        for rank in range(size)
    ]
    try:
        answers = [json.loads(p.communicate(timeout=TIMEOUT_S)[0]) for p in processes]
    finally:
        for process in processes:
            process.kill()
    return {
        name: {key: sum(a[name][key] for a in answers) / size for key in answers[0][name]}
        for name in SETTINGS
    }


def main() -> None:
    results: dict[str, Any] = {name: {} for name in SETTINGS}
    for size in SIZES:
        apart, together = run_ranks(size, together=False), run_ranks(size, together=True)
        for name, figures in together.items():
            cpu_us, apart_us = figures["cpu_us_a_step"], apart[name]["cpu_us_a_step"]
            first_us = results[name].get("1", {"cpu_us_a_step": cpu_us})["cpu_us_a_step"]
            results[name]["model_bytes"] = int(figures["model_bytes"])
            row = results[name][str(size)] = {
                "cpu_us_a_step": round(cpu_us, 1),
                "apart_cpu_us_a_step": round(apart_us, 1),
                "efficiency": round(first_us / cpu_us, 2),
                "efficiency_to_apart": round(apart_us / cpu_us, 2),
                "models_an_update": round(figures["bytes_an_update"] / figures["model_bytes"], 2),
                "mbytes_a_second": round(figures["bytes_a_second"] / 1e6, 2),
            }
            print(
                f"{name}, {size} ranks: {cpu_us:.0f} us of CPU a step, {apart_us:.0f} us without "
                f"each other; each receives {row['models_an_update']} times the model for an "
                f"update, {row['mbytes_a_second']:.1f} MB/s"
            )
            if "buckets" in figures:
                row |= {key: round(figures[key], 2) for key in OVERLAP}
                print(
                    f"    a backward pass of {row['backward_ms']} ms; gradients ("
                    f"{row['buckets']:.0f} buckets) take {row['gradients_ms']} ms, "
                    f"{row['overlap_ms']} of them meanwhile"
                )
    print(json.dumps(results))


if __name__ == "__main__":
    run_rank() if sys.argv[1:] == ["rank"] else main()
