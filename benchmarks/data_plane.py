"""How fast the data plane moves steps when environments, model and learner cost next to nothing.

Mock frames (4x84x84) from worker processes, a model that reads a few pixels, a learner that takes
every rollout (T=20). Their speed is compared with that at which one core copies each frame three
times with memcpy. Then the CPU time of a step, with 8 to 512 environments. Last line: JSON.

    python benchmarks/data_plane.py [--seconds 10]
"""

import json
import os
import statistics
import threading
import time
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import tyro

import libtorchbeast
from libtorchbeast.env_workers import Workers, WorkersConfig
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec

FRAME_BYTES = 4 * 84 * 84
NUM_ACTIONS = 6
T = 20
SIZES = (8, 32, 128, 512)


@dataclass(frozen=True)
class Options:
    """Measure the data plane."""

    seconds: float = 10.0
    """Length of each measurement, after a warm-up."""
    num_workers: int = max(2, os.cpu_count() or 2)
    """Processes that step environments."""
    envs_per_lane: int = 32
    """Environments that step together, for the comparison with memcpy."""


def memcpy_steps_per_s() -> float:
    """Frames that one core copies three times in a second, from and to memory out of the caches."""
    source = np.ones((4096, FRAME_BYTES), np.uint8)
    target = np.ones_like(source)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        rates.append(len(source) / (time.perf_counter() - start) / 3)
    return statistics.median(rates)


@dataclass(frozen=True)
class Figures:
    """The result of one measurement."""

    steps_per_s: float
    cpu_us_a_step: float


def measure(options: Options, num_workers: int, num_lanes: int, envs_per_lane: int) -> Figures:
    """Run the whole data plane for a while; returns its speed and CPU time."""
    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=envs_per_lane,
        maximum_batch_size=envs_per_lane,
        maximum_queue_size=2 * envs_per_lane,
    )
    batcher = libtorchbeast.DynamicBatcher(maximum_batch_size=1024)
    workers = Workers(
        WorkersConfig(
            factory="torchbeast.envs:make_group",
            factory_options={"env": "Mock"},
            spec=Spec(ArraySpec("uint8", (4, 84, 84))),
            num_workers=num_workers,
            num_groups=num_lanes,
            envs_per_group=envs_per_lane,
            seed=0,
        )
    )
    pool = libtorchbeast.ActorPool(T, queue, batcher, initial_agent_state=())
    threads = [
        threading.Thread(target=run_agent, args=(batcher,)),
        threading.Thread(target=run_learner, args=(queue,)),
    ]
    for lane in workers.lanes:
        pool.add_lane(lane)
    for thread in threads:
        thread.start()
    try:
        while pool.count() < 50 * num_lanes * envs_per_lane:
            workers.poll()
            time.sleep(0.05)
        family = [psutil.Process(), *(psutil.Process(pid) for pid in workers.supervisor.pids)]
        steps, cpu, start = pool.count(), cpu_seconds(family), time.perf_counter()
        while time.perf_counter() < start + options.seconds:
            workers.poll()
            time.sleep(0.1)
        steps = pool.count() - steps
        return Figures(
            steps / (time.perf_counter() - start), 1e6 * (cpu_seconds(family) - cpu) / steps
        )
    finally:
        queue.close()
        batcher.close()
        pool.run()
        workers.close()
        for thread in threads:
            thread.join(10)


def run_agent(batcher: libtorchbeast.DynamicBatcher) -> None:
    """Run a model that reads a few pixels."""
    torch.set_num_threads(1)
    weights = torch.randn(16, NUM_ACTIONS)
    with torch.inference_mode():
        for batch in batcher:
            row, state = batch.get_inputs()
            logits = row["frame"][..., 0, 40, 30:46].float() @ weights  # [1, B, NUM_ACTIONS]
            output = {"action": logits.argmax(dim=-1), "policy_logits": logits}
            batch.set_outputs((output, state))


def run_learner(queue: libtorchbeast.BatchingQueue) -> None:
    """Take every rollout and read a part of it."""
    torch.set_num_threads(1)
    for (rows, outputs), _ in queue:
        pixels, logits = rows["frame"][..., 0, 40, 30:46], outputs["policy_logits"]
        (pixels.float().mean() + rows["reward"].mean() + logits.mean()).item()


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(p.cpu_times().user + p.cpu_times().system for p in processes)


def main(options: Options) -> None:
    before = memcpy_steps_per_s()
    lanes = 2 * options.num_workers
    figures = measure(options, options.num_workers, lanes, options.envs_per_lane)
    memcpy = statistics.mean([before, memcpy_steps_per_s()])
    ratio = figures.steps_per_s / memcpy
    print(f"{figures.steps_per_s:,.0f} steps/s; three memcpys of a frame: {memcpy:,.0f}/s")
    costs = {}
    for num_envs in SIZES:
        num_lanes = max(4, num_envs // options.envs_per_lane)
        sized = measure(options, 2, num_lanes, num_envs // num_lanes)
        costs[num_envs] = sized.cpu_us_a_step
        print(
            f"{num_envs:4} environments: {sized.cpu_us_a_step:.1f} us of CPU a step, "
            f"{sized.steps_per_s:,.0f} steps/s"
        )
    print(
        json.dumps(
            {
                "steps_per_s": round(figures.steps_per_s),
                "memcpy_ratio": round(ratio, 3),
                "memcpy_steps_per_s": round(memcpy),
                "cost_512_vs_8": round(costs[512] / costs[8], 3),
                "cost_512_vs_32": round(costs[512] / costs[32], 3),
            }
        )
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
