"""Steps a second over gRPC on this machine, compared with bare grpcio and the same bytes.

Four measurements: one server process with 32 Mock environments (4x84x84) in two streams, dialled
by a gateway; in turns with it, two programs of bare grpcio that exchange as many bytes in as many
messages; 256 streams of one small environment each, which dial in; and what is gained by encoding
Steps by hand instead of with protobuf's own code. The agent answers with zeros, and the learner
discards rollouts.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
import psutil

import libtorchbeast
from libtorchbeast.groups import Group
from libtorchbeast.malloc import KEEP_FREED_MEMORY
from libtorchbeast.rows import NUMBERS, EpisodeCounter, Row, Spec, Unstacked
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.env_server import EnvironmentServer
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.limits import Limits, channel_options, server_options
from libtorchbeast.rpc.messages import LEARNER_METHOD, encode_hello
from libtorchbeast.rpc.step_messages import encode_step
from libtorchbeast.specs import ArraySpec

NUM_ENVS = 32  # of one server process, in two streams
STEP_BYTES = 4 * 84 * 84 + 14
NUM_STREAMS = 256
SECONDS = 10.0
NUM_ROUNDS = 10
ROUND_S = 2.0
START_S = 60.0
LIMITS = Limits()
SMALL = Spec(ArraySpec("float32", (10, 5)), ArraySpec("int64"))


def main() -> None:
    figures = measure_group()
    figures |= measure_streams()
    figures |= measure_encoding()
    for name, value in figures.items():
        print(f"{name:32} {value:12,.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


# ---------------------------------------------------------------- one server of many environments


def measure_group() -> dict[str, float]:
    """Measure our server in turns with bare grpcio, so that other programs disturb both alike.

    Bare grpcio also runs at its best: with the allocator's settings of our processes, without which
    large messages take it up to three times as long.
    """
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(process(serve_mock, environment=KEEP_FREED_MEMORY))
        bare = stack.enter_context(bare_grpc({}))
        tuned = stack.enter_context(bare_grpc(KEEP_FREED_MEMORY))
        pool, gateways, playing = stack.enter_context(learner(server_addresses=[mock.recv()]))
        wait_for(gateways, lambda: gateways.num_streams == 2 and pool.count() > 10 * NUM_ENVS)
        rounds: list[dict[str, float]] = []
        cpu_s, num_steps = 0.0, 0
        for number in range(NUM_ROUNDS + 1):
            steps, seconds, cpu = count_steps(pool, gateways, ROUND_S)
            playing.clear()
            rates = {"ours": steps / seconds}
            for name, program in (("bare", bare), ("tuned", tuned)):
                program.send(ROUND_S)
                wait_for(gateways, program.poll)
                rates[name] = program.recv()
            playing.set()
            if number > 0:  # the first round warms all up
                rounds.append(rates)
                cpu_s, num_steps = cpu_s + cpu, num_steps + steps
        ratios = [rates["ours"] / rates["bare"] for rates in rounds]
        return {
            "steps_per_s": median(rates["ours"] for rates in rounds),
            "bare_steps_per_s": median(rates["bare"] for rates in rounds),
            "tuned_bare_steps_per_s": median(rates["tuned"] for rates in rounds),
            "vs_bare_grpc": median(ratios),
            "vs_bare_grpc_worst_round": min(ratios),
            "vs_bare_grpc_best_round": max(ratios),
            "vs_tuned_bare_grpc": median(rates["ours"] / rates["tuned"] for rates in rounds),
            "gateway_cpu_us_per_step": 1e6 * cpu_s / num_steps,
            "messages_per_step_each_way": 2 / NUM_ENVS,
        }


def serve_mock(pipe: Any) -> None:
    from torchbeast.envs import make_group  # as polybeast_env does

    server = EnvironmentServer(
        lambda knows_truncation: Group(lambda seed: make_group(NUM_ENVS // 2, seed, env="Mock"), 1),
        "127.0.0.1:0",
        num_streams=2,
    )
    server.run(pipe.send)


# ------------------------------------------------------------------------------------- bare grpcio


def serve_bare(pipe: Any) -> None:
    import grpc

    step = bytes(NUM_ENVS // 2 * STEP_BYTES)

    def play(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for _ in requests:
            yield step

    server = grpc.server(ThreadPoolExecutor(4), options=server_options(LIMITS))
    handler = grpc.stream_stream_rpc_method_handler(play)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("B", {"P": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    server.wait_for_termination(10 * START_S)


def dial_bare(pipe: Any, address: str) -> None:
    """For each number of seconds from the pipe: exchange messages in two streams, send the rate."""
    import grpc.aio

    async def exchange(call: Any, seconds: float) -> float:
        actions = bytes(NUM_ENVS // 2 * 8)
        start, num_messages = time.monotonic(), 0
        while time.monotonic() < start + seconds:
            writing = asyncio.ensure_future(call.write(actions))
            await call.read()
            await writing
            num_messages += 1
        return num_messages * NUM_ENVS // 2 / (time.monotonic() - start)

    async def dial() -> None:
        options = channel_options(LIMITS)
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(2)]
        calls = [channel.stream_stream("/B/P")() for channel in channels]
        while True:
            seconds = await asyncio.to_thread(pipe.recv)
            pipe.send(sum(await asyncio.gather(*[exchange(call, seconds) for call in calls])))

    asyncio.run(dial())


@contextlib.contextmanager
def bare_grpc(environment: dict[str, str]) -> Iterator[Any]:
    """Run both programs of bare grpcio; yields the pipe to the one that dials."""
    with (
        process(serve_bare, environment=environment) as server,
        process(dial_bare, server.recv(), environment=environment) as client,
    ):
        yield client


# ------------------------------------------------------------------------------ many streams of one


def measure_streams() -> dict[str, float]:
    with learner(listen=["127.0.0.1:0"]) as (pool, gateways, _):
        with process(dial_many, gateways.listening[0]) as pipe:
            wait_for(gateways, lambda: pool.count() > 2 * NUM_STREAMS or pipe.poll())
            wait_for(gateways, lambda: gateways.num_streams == NUM_STREAMS)
            pipe.send("count")
            steps, seconds, cpu_s = count_steps(pool, gateways, SECONDS)
            pipe.send("stop")
            wait_for(gateways, pipe.poll)
            counts = pipe.recv()
        return {
            "streams_256_steps_per_s": steps / seconds,
            "streams_256_fairness": max(counts) / max(min(counts), 1),
            "streams_256_fewest_steps": min(counts),
            "streams_256_gateway_cpu_us_per_step": 1e6 * cpu_s / steps,
        }


def dial_many(pipe: Any, address: str) -> None:
    """Run clients that send the same step as soon as they have their actions."""
    import grpc.aio

    hello = encode_hello(Hello("benchmark", 1, SMALL))
    frame = np.zeros((1, *SMALL.observation.shape), np.float32)
    counter, no = EpisodeCounter(1), np.zeros(1, bool)
    first = encode_step(counter.first_row(frame))
    later = encode_step(counter.row(frame, np.ones(1), no, no, np.zeros(1)))
    counts = [0] * NUM_STREAMS

    async def play(channel: Any, number: int) -> None:
        call = channel.stream_stream("/" + "/".join(LEARNER_METHOD))()
        await call.write(hello)
        await call.read()
        await call.write(first)
        while await call.read() is not grpc.aio.EOF:
            counts[number] += 1
            await call.write(later)

    async def dial() -> list[int]:
        options = channel_options(LIMITS)
        channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(play(channel, i)) for i, channel in enumerate(channels)]
        await asyncio.to_thread(pipe.recv)
        before = list(counts)
        await asyncio.to_thread(pipe.recv)
        result = [b - a for a, b in zip(before, counts, strict=True)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return result

    pipe.send(asyncio.run(dial()))


# ------------------------------------------------------------------------------- Steps to messages


def measure_encoding() -> dict[str, float]:
    """CPU time of encoding a step, in a process with the allocator's settings of our servers."""
    with process(time_encoding, environment=KEEP_FREED_MEMORY) as pipe:
        return pipe.recv()


def time_encoding(pipe: Any) -> None:
    """Time the encoding of messages with 16 environments; both ways take turns."""

    def generated(row: Row) -> bytes:
        numbers = {k: row[k].tolist() for k in NUMBERS if k != "truncated"}
        step = pb.Step(observation=[np.asarray(row["frame"]).tobytes()], **numbers)
        return pb.EnvironmentMessage(step=step).SerializeToString()

    num_envs = NUM_ENVS // 2
    frames = Unstacked([np.zeros((4, 84, 84), np.uint8)] * num_envs)
    row = EpisodeCounter(num_envs).first_row(frames)
    assert pb.EnvironmentMessage.FromString(encode_step(row)).step.observation
    times: dict[str, list[float]] = {"encode": [], "generated_encode": []}
    for _ in range(NUM_ROUNDS):
        for name, encode in (("encode", encode_step), ("generated_encode", generated)):
            start = time.process_time()
            for _ in range(200):
                encode(row)
            times[name].append((time.process_time() - start) / (200 * num_envs))
    pipe.send({f"{name}_us_per_step": 1e6 * median(values) for name, values in times.items()})


# ------------------------------------------------------------------------------------------ helpers


@contextlib.contextmanager
def learner(**options: Any) -> Iterator[tuple[libtorchbeast.ActorPool, Gateways, threading.Event]]:
    """An agent that answers with zeros while the event is set, a learner that discards rollouts."""
    import torch

    queue = libtorchbeast.BatchingQueue(
        minimum_batch_size=NUM_ENVS // 2, maximum_batch_size=NUM_ENVS // 2
    )
    batcher = libtorchbeast.DynamicBatcher(timeout_ms=20)

    def infer() -> None:
        for batch in batcher:
            playing.wait(START_S)
            row, state = batch.get_inputs()
            batch.set_outputs(({"action": zeros[:, : row["reward"].shape[1]]}, state))

    def take() -> None:
        for _ in queue:
            pass

    zeros = torch.zeros(1, 1024, dtype=torch.int64)
    playing = threading.Event()
    playing.set()
    pool = libtorchbeast.ActorPool(20, queue, batcher)
    gateways = Gateways(GatewaysConfig(**options))
    gateways.open()
    gateways.start(pool.add_lane)
    threads = [threading.Thread(target=f) for f in (infer, take, pool.run)]
    for thread in threads:
        thread.start()
    try:
        yield pool, gateways, playing
    finally:
        playing.set()
        queue.close()
        batcher.close()
        gateways.close()
        for thread in threads:
            thread.join(START_S)


@contextlib.contextmanager
def process(
    function: Callable[..., None], *arguments: Any, environment: dict[str, str] | None = None
) -> Iterator[Any]:
    """Run a function in another process, with more environment variables; yields a pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=function, args=(theirs, *arguments), daemon=True)
    with unittest.mock.patch.dict(os.environ, environment or {}):
        child.start()
    try:
        yield ours
    finally:
        child.kill()
        child.join(START_S)


def wait_for(gateways: Gateways, condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("The environments did not start in time.")
        gateways.poll()
        time.sleep(0.05)


def count_steps(
    pool: libtorchbeast.ActorPool, gateways: Gateways, seconds: float
) -> tuple[int, float, float]:
    """Steps, seconds, and CPU-seconds of the gateways' processes, measured for so many seconds."""
    processes = [psutil.Process(pid) for pid in gateways.pids]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    steps, start, cpu_before = pool.count(), time.monotonic(), cpu_s()
    while time.monotonic() < start + seconds:
        gateways.poll()
        time.sleep(0.1)
    return pool.count() - steps, time.monotonic() - start, cpu_s() - cpu_before


if __name__ == "__main__":
    main()
