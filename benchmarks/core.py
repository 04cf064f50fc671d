"""How fast the C++ core is, compared with what one would use instead.

    python benchmarks/core.py

(a) round trips of Python threads through BatchingQueue and DynamicBatcher, (b) assembling a
learner's batch against memcpy and torch.cat, (c) nest against optree and torch's pytree.
Ratios compare times measured side by side in this run: above 1, ours is faster. Last line: JSON.
"""

import ctypes
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optree
import torch
from torch.utils import _pytree as pytree

import nest
from libtorchbeast import BatchingQueue, DynamicBatcher

FRAME = (4, 84, 84)
SECONDS, REPEATS = 0.5, 3  # For each measurement of round trips; the median counts.


def median_times(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each function; all are called in turn, and freeing results is not timed."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            result = function()
            times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(values) for name, values in times.items()}


def env_outputs(num_rows: int) -> tuple[torch.Tensor, ...]:
    """What an actor sends to inference: frame, reward, done, episode step and return, [T=1, B]."""
    frame = torch.zeros(1, num_rows, *FRAME, dtype=torch.uint8)
    done = torch.zeros(1, num_rows, dtype=torch.bool)
    step = torch.zeros(1, num_rows, dtype=torch.int32)
    return frame, torch.zeros(1, num_rows), done, step, torch.zeros(1, num_rows)


def run_threads(produce: Callable[[], None], consume: Callable[[], None], num_threads: int) -> None:
    targets = [produce] * num_threads + [consume] * 2
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def batcher_rows_per_second(num_threads: int, num_rows: int) -> float:
    batcher = DynamicBatcher(batch_dim=1, maximum_batch_size=512)
    inputs = (env_outputs(num_rows), ())
    outputs = (torch.zeros(1, 512), torch.zeros(1, 512, 6), torch.zeros(1, 512))
    calls = itertools.count()
    deadline = time.perf_counter() + SECONDS

    def actor() -> None:
        try:
            while time.perf_counter() < deadline:
                batcher.compute(inputs)
                next(calls)
            batcher.close()
        except RuntimeError:  # Closed by another thread.
            return

    def inference() -> None:
        for batch in batcher:
            size = batch.get_inputs()[0][0].shape[1]
            batch.set_outputs((tuple(x[:, :size] for x in outputs), ()))

    run_threads(actor, inference, num_threads)
    return next(calls) * num_rows / SECONDS


def queue_rows_per_second(num_threads: int, num_rows: int) -> float:
    queue = BatchingQueue(batch_dim=1, maximum_batch_size=512, maximum_queue_size=512)
    item = (env_outputs(num_rows), ())
    received = [0, 0]
    consumers = iter(range(2))
    deadline = time.perf_counter() + SECONDS

    def actor() -> None:
        try:
            while time.perf_counter() < deadline:
                queue.enqueue(item)
            queue.close()
        except RuntimeError:  # Closed by another thread.
            return

    def learner() -> None:
        consumer = next(consumers)
        for batch in queue:
            received[consumer] += batch[0][0].shape[1]

    run_threads(actor, learner, num_threads)
    return sum(received) / SECONDS


def measure_round_trips() -> dict[str, float]:
    print("rows a second                    queue     batcher")
    results: dict[str, float] = {}
    for num_rows, num_threads in itertools.product([1, 32], [1, 8, 64]):
        queue, batcher = (
            statistics.median(measure(num_threads, num_rows) for _ in range(REPEATS))
            for measure in (queue_rows_per_second, batcher_rows_per_second)
        )
        print(
            f"  {num_threads:2} threads, {num_rows:2} rows an item {queue:11,.0f} {batcher:11,.0f}"
        )
        results[f"queue_rows_per_s_{num_threads}x{num_rows}"] = round(queue)
        results[f"batcher_rows_per_s_{num_threads}x{num_rows}"] = round(batcher)
    results["batcher_rows_per_s"] = results["batcher_rows_per_s_64x32"]
    return results


def measure_learner_batch() -> dict[str, float]:
    """Assemble [81, 32, 4, 84, 84] bytes from 32 rollouts.

    Buffers are warm, except for a plain torch.cat, which allocates its result each time.
    """
    rollouts = [torch.randint(255, (81, 1, *FRAME), dtype=torch.uint8) for _ in range(32)]
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=32, maximum_batch_size=32)
    source = torch.cat(rollouts, dim=1)
    target = torch.zeros_like(source)

    def enqueue_all() -> None:
        for rollout in rollouts:
            queue.enqueue(rollout)

    enqueue_all()
    assert torch.equal(next(queue), source)
    functions: dict[str, Callable[[], Any]] = {
        "enqueue": enqueue_all,
        "batch": lambda: next(queue),
        "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes),
        "torch.cat": lambda: torch.cat(rollouts, dim=1),
        "torch.cat, warm": lambda: torch.cat(rollouts, dim=1, out=target),
    }
    seconds = median_times(functions, 15)
    print(f"learner batch [81, 32, 4, 84, 84], {source.nbytes / 1e6:.0f} MB")
    for name in list(functions)[1:]:
        speed = source.nbytes / seconds[name] / 1e9
        print(f"  {name:15} {seconds[name] * 1e3:6.1f} ms {speed:6.1f} GB/s")
    return {
        "batch_vs_memcpy": round(seconds["memcpy"] / seconds["batch"], 2),
        "batch_vs_torch_cat": round(seconds["torch.cat"] / seconds["batch"], 2),
        "batch_vs_warm_torch_cat": round(seconds["torch.cat, warm"] / seconds["batch"], 2),
    }


def identity(x: Any) -> Any:
    return x


def optree_pack_as(n: Any, leaves: list[Any]) -> Any:
    return optree.tree_unflatten(optree.tree_structure(n, none_is_leaf=True), leaves)


def pytree_pack_as(n: Any, leaves: list[Any]) -> Any:
    return pytree.tree_unflatten(leaves, pytree.tree_structure(n))


def nest_operations(n: Any) -> dict[str, list[Callable[[], Any]]]:
    """By operation: its implementations in nest, optree and pytree."""
    leaves = nest.flatten(n)
    return {
        "map": [
            partial(nest.map, identity, n),
            partial(optree.tree_map, identity, n, none_is_leaf=True),
            partial(pytree.tree_map, identity, n),
        ],
        "map_many2": [
            partial(nest.map_many2, max, n, n),
            partial(optree.tree_map, max, n, n, none_is_leaf=True),
            partial(pytree.tree_map, max, n, n),
        ],
        "flatten": [
            partial(nest.flatten, n),
            partial(optree.tree_leaves, n, none_is_leaf=True),
            partial(pytree.tree_leaves, n),
        ],
        "pack_as": [
            partial(nest.pack_as, n, leaves),
            partial(optree_pack_as, n, leaves),
            partial(pytree_pack_as, n, leaves),
        ],
    }


def call_often(function: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        function()


def measure_nest() -> dict[str, float]:
    env = (1, 2, 3, 4, 5)
    structures = {
        "tuple": ((env, (6, 7, 8)), ((9, 10),)),
        "dict": {"frame": 1, "reward": 2, "done": 3, "step": 4, "return": 5, "action": 6},
        "deep": {"a": [env, {"b": env, "c": (1, [2, (3, {"d": 4})])}], "e": {"f": env}},
    }
    times = 2000
    ratios: dict[str, list[float]] = {"optree": [], "pytree": []}
    print("nanoseconds a call                 nest   optree   pytree")
    for name, n in structures.items():
        for operation, functions in nest_operations(n).items():
            loops = [partial(call_often, function, times) for function in functions]
            named = dict(zip(["nest", "optree", "pytree"], loops, strict=True))
            ns = {k: v / times * 1e9 for k, v in median_times(named, 7).items()}
            print(
                f"  {operation:9} {name:6} {len(nest.flatten(n)):2} leaves  "
                f"{ns['nest']:8.0f} {ns['optree']:8.0f} {ns['pytree']:8.0f}"
            )
            for rival, values in ratios.items():
                values.append(ns[rival] / ns["nest"])
    results = {}
    for rival, values in ratios.items():
        results[f"nest_vs_{rival}"] = round(statistics.geometric_mean(values), 2)
        results[f"nest_vs_{rival}_worst"] = round(min(values), 2)
    return results


def main() -> None:
    torch.set_num_threads(1)  # One core for all of them; torch.cat is faster with one here.
    results = measure_round_trips() | measure_learner_batch() | measure_nest()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
