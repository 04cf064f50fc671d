"""BatchingQueue: one test for each promise, then many threads at once."""

import contextlib
import gc
import inspect
import itertools
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import libtorchbeast
from libtorchbeast import BatchingQueue, ClosedBatchingQueue
from tests.helpers.threads import run_in_threads, shortest_ms, wait_until


def rows(*values, batch_dim=0):
    """A tensor with one row for each value."""
    return torch.tensor(values).reshape([1] * batch_dim + [-1, 1])


class Step(NamedTuple):
    frame: torch.Tensor
    reward: torch.Tensor


def test_exceptions_are_exported_and_fit_existing_handlers():
    import nest

    assert issubclass(libtorchbeast.ClosedBatchingQueue, RuntimeError)
    assert issubclass(libtorchbeast.AsyncError, RuntimeError)
    assert issubclass(libtorchbeast.NestError, ValueError)
    assert libtorchbeast.NestError is nest.NestError


def test_arguments_are_taken_by_position_and_by_name():
    BatchingQueue(1, 1, 1024, None, True, None)
    BatchingQueue(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=1024,
        timeout_ms=None,
        check_inputs=True,
        maximum_queue_size=None,
    )
    assert inspect.getdoc(BatchingQueue)


def test_defaults():
    queue = BatchingQueue()
    for _ in range(1025):
        queue.enqueue(torch.zeros(1, 1))
    assert next(queue).shape == (1, 1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1"),
        (
            {"minimum_batch_size": 2, "maximum_batch_size": 1},
            "Max batch size must be >= min batch size",
        ),
        (
            {"maximum_batch_size": 2, "maximum_queue_size": 1},
            "Max queue size must be >= max batch size",
        ),
        ({"batch_dim": -1}, "batch_dim must be >= 0"),
        ({"timeout_ms": -1}, "timeout_ms must be >= 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchingQueue(**arguments)


def test_tensors_need_the_batch_dimension():
    queue = BatchingQueue(batch_dim=3)
    message = "Enqueued tensors must have more than batch_dim == 3"
    with pytest.raises(ValueError, match=message):
        queue.enqueue(torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match=message):
        queue.enqueue([torch.zeros(1, 1, 1, 1), torch.zeros(())])
    assert queue.size() == 0


@pytest.mark.parametrize("empty", [(), [], {}, ((), {"a": []})])
def test_a_nest_without_tensors_is_refused(empty):
    with pytest.raises(ValueError, match="Cannot enqueue empty vector of tensors"):
        BatchingQueue().enqueue(empty)


def test_tensors_of_an_item_have_the_same_number_of_rows():
    queue = BatchingQueue(batch_dim=0)
    with pytest.raises(ValueError, match=r"same size.*\[2\] beside \[1\]"):
        queue.enqueue((torch.zeros(1), torch.zeros(2)))
    with pytest.raises(ValueError, match="at least 1"):
        queue.enqueue(torch.zeros(0))


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ({"b": torch.zeros(1, 2)}, libtorchbeast.NestError, "nests don't match: expected {a: \\*}"),
        ({"a": torch.zeros(1, 3)}, ValueError, r"same shape.*got \[1, 3\] after \[1, 2\]"),
        ({"a": torch.zeros(1, 2).int()}, ValueError, "same dtype, got int32 after float32"),
    ],
)
def test_an_item_that_does_not_fit_is_refused_where_it_comes_from(item, error, message):
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue({"a": torch.zeros(1, 2)})
    with pytest.raises(error, match=message):
        queue.enqueue(item)
    assert next(queue)["a"].shape == (1, 2)


def test_tensors_are_concatenated_along_the_batch_dimension():
    for batch_dim in range(3):
        queue = BatchingQueue(batch_dim=batch_dim, minimum_batch_size=2)
        items = [torch.rand(2, 2, 2).narrow(batch_dim, 0, n) for n in (1, 2)]
        for item in items:
            queue.enqueue(item)
        assert torch.equal(next(queue), torch.cat(items, dim=batch_dim))


def test_a_batch_is_a_nest_of_torch_tensors_like_the_items():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    for i in (1, 2):
        item = {"step": Step(torch.full((1, 2), i), np.full((1,), i)), "state": ([rows(i)], ())}
        queue.enqueue(item)
    batch = next(queue)
    assert type(batch) is dict
    assert type(batch["step"]) is Step
    assert type(batch["state"]) is tuple
    assert type(batch["state"][0]) is list
    assert batch["state"][1] == ()
    assert batch["step"].frame.tolist() == [[1, 1], [2, 2]]
    assert batch["step"].reward.tolist() == [1, 2]
    assert type(batch["step"].reward) is torch.Tensor


def test_non_contiguous_items_arrive_right():
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=6)
    items = [torch.rand(3, 2, 4).permute(2, 1, 0)[::2], torch.rand(2, 8, 3)[:, ::2]]
    for item in items:
        queue.enqueue(item)
    assert torch.equal(next(queue), torch.cat(items, dim=1))


def test_sizes_count_rows_and_a_large_item_is_split():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=3, maximum_batch_size=4)
    queue.enqueue(rows(0, 1, 2, 3, 4))
    queue.enqueue(rows(5))
    queue.enqueue(rows(6))
    assert queue.size() == 7
    assert next(queue).flatten().tolist() == [0, 1, 2, 3]
    assert next(queue).flatten().tolist() == [4, 5, 6]
    assert queue.size() == 0


def test_a_batch_is_only_handed_out_at_its_minimum_size():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, maximum_batch_size=2)
    batches = []
    with run_in_threads(lambda: batches.append(next(queue))):
        queue.enqueue(rows(1))
        time.sleep(0.05)  # Not for synchronisation: time in which it must not happen.
        assert not batches
        assert queue.size() == 1
        queue.enqueue(rows(2))
    assert batches[0].flatten().tolist() == [1, 2]


def test_a_timeout_hands_out_a_smaller_batch():
    timeout_ms = 200
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, timeout_ms=timeout_ms)

    def dequeue():
        queue.enqueue(rows(1))
        assert next(queue).shape == (1, 1)

    assert timeout_ms <= shortest_ms(dequeue, timeout_ms * 1.1) <= timeout_ms * 1.1


def test_a_timeout_without_rows_hands_out_nothing():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2, timeout_ms=1)
    with run_in_threads(lambda: next(queue, None)) as [consumer]:
        consumer.join(0.05)
        assert consumer.is_alive()
        queue.close()


def test_enqueue_blocks_while_the_queue_is_full():
    queue = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=2)
    queue.enqueue(rows(1, 2))
    with run_in_threads(lambda: queue.enqueue(rows(3))) as [producer]:
        producer.join(0.05)
        assert producer.is_alive()
        assert next(queue).item() == 1
        producer.join()
        assert queue.size() == 2
    assert [next(queue).item() for _ in range(2)] == [2, 3]


def test_a_second_close_is_an_error():
    queue = BatchingQueue()
    assert not queue.is_closed()
    queue.close()
    assert queue.is_closed()
    with pytest.raises(RuntimeError, match="Queue was closed already"):
        queue.close()


def test_after_close_iteration_stops_and_enqueue_raises():
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(rows(1))
    queue.close()
    assert list(queue) == []
    assert queue.size() == 0
    with pytest.raises(ClosedBatchingQueue, match="Enqueue to closed queue"):
        queue.enqueue(rows(1))


def test_close_wakes_every_consumer_and_producer():
    full = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
    full.enqueue(rows(1))
    empty = BatchingQueue(batch_dim=0)
    outcomes = []

    def consume():
        outcomes.append(list(empty))

    def produce():
        with pytest.raises(ClosedBatchingQueue):
            full.enqueue(rows(2))
        outcomes.append("closed")

    with run_in_threads(*[consume] * 8, *[produce] * 8):
        full.close()
        empty.close()
    assert outcomes.count([]) == 8
    assert outcomes.count("closed") == 8


@settings(deadline=None, max_examples=30)
@given(
    items=st.lists(st.lists(st.integers(1, 5), max_size=25), min_size=1, max_size=6),
    num_consumers=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3)),
    close_after=st.none() | st.integers(0, 60),
)
def test_nothing_lost_nothing_twice_order_kept(items, num_consumers, sizes, close_after):
    """Producers enqueue items of many sizes; somebody may close the queue at any moment."""
    minimum, more, room = sizes
    queue = BatchingQueue(
        batch_dim=0,
        minimum_batch_size=minimum,
        maximum_batch_size=minimum + more,
        timeout_ms=1,
        maximum_queue_size=minimum + more + room,
    )
    enqueued = [0] * len(items)  # Rows of each producer.
    received = [[] for _ in range(num_consumers)]
    total = sum(map(sum, items)) if close_after is None else min(close_after, sum(map(sum, items)))
    count, lock = itertools.count(1), threading.Lock()

    def close():
        with lock:
            if not queue.is_closed():
                queue.close()

    def produce(producer):
        for size in items[producer]:
            start = enqueued[producer]
            item = torch.tensor([(producer, start + i) for i in range(size)])
            try:
                queue.enqueue(item)
            except ClosedBatchingQueue:
                return
            enqueued[producer] += size

    def consume(consumer):
        for batch in queue:
            assert 1 <= len(batch) <= minimum + more
            received[consumer] += map(tuple, batch.tolist())
            for _ in batch:
                if next(count) == total:
                    close()

    if total == 0:
        close()
    producers = [lambda p=p: produce(p) for p in range(len(items))]
    consumers = [lambda c=c: consume(c) for c in range(num_consumers)]
    with run_in_threads(*producers, *consumers):
        pass

    everything = sorted(itertools.chain(*received))
    assert len(set(everything)) == len(everything), "a row came twice"
    assert len(everything) >= total, "a row was lost"
    # A row may be in a batch although the call that brought it was cut short by close().
    assert all(row < sum(items[producer]) for producer, row in everything)
    for consumer in received:
        for producer in range(len(items)):
            mine = [row for p, row in consumer if p == producer]
            assert mine == sorted(mine), "out of order"
    if close_after is None:
        assert everything == [(p, i) for p in range(len(items)) for i in range(enqueued[p])]


def test_a_batch_does_not_share_memory_with_its_items():
    queue = BatchingQueue(batch_dim=0)
    item = rows(1)
    queue.enqueue(item)
    batch = next(queue)
    item.fill_(7)
    assert batch.item() == 1


def test_memory_is_used_again_once_the_tensors_are_gone():
    queue = BatchingQueue(batch_dim=0)
    item = torch.zeros(1, 1 << 20)

    def batch():
        queue.enqueue(item)
        return next(queue)

    kept = batch()
    addresses = {batch().data_ptr() for _ in range(10)}
    assert len(addresses) == 1
    assert kept.data_ptr() not in addresses
    view = batch()[0, 5:6]
    assert batch().data_ptr() != view.data_ptr() - 5 * 4


def test_tensors_outlive_their_queue():
    queue = BatchingQueue(batch_dim=0)
    queue.enqueue(torch.full((1, 1 << 20), 3))
    batch = next(queue)
    del queue
    gc.collect()
    assert (batch == 3).all()


def test_tensors_may_go_in_another_thread():
    queue = BatchingQueue(batch_dim=0)
    batches = []
    for i in range(50):
        queue.enqueue(torch.full((1, 10_000), i))
        batches.append(next(queue))
    with run_in_threads(*[lambda: [batches.pop() for _ in range(10)]] * 5):
        pass
    assert not batches


def test_no_memory_is_leaked():
    queue = BatchingQueue(batch_dim=0, minimum_batch_size=2)
    array = np.zeros((1, 1000))
    item = {"a": (torch.zeros(1, 1000), Step(torch.zeros(1), array))}
    bad = {"a": (torch.zeros(1, 1000), torch.zeros(1))}

    def operate(times):
        for _ in range(times):
            queue.enqueue(item)
            with contextlib.suppress(ValueError):
                queue.enqueue(bad)
            queue.enqueue(item)
            next(queue)

    def references():
        gc.collect()
        return sys.getrefcount(array), sys.getrefcount(item["a"][0]), sys.getrefcount(Step)

    operate(1000)
    before, blocks = references(), sys.getallocatedblocks()
    memory = psutil.Process().memory_info().rss
    operate(20_000)
    assert references() == before
    assert sys.getallocatedblocks() - blocks < 1000
    assert psutil.Process().memory_info().rss - memory < 8 << 20


@pytest.mark.parametrize(
    "call",
    [
        "next(queue)",
        pytest.param("full.enqueue(x)", marks=pytest.mark.slow),
        pytest.param("batcher.compute(x)", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_interrupts_a_call_that_waits(call):
    program = f"""
import os, signal, threading, torch
from libtorchbeast import BatchingQueue, DynamicBatcher
signal.signal(signal.SIGINT, signal.default_int_handler)  # Jobs in the background ignore it.
x = torch.zeros(1)
queue, batcher = BatchingQueue(batch_dim=0), DynamicBatcher(batch_dim=0)
full = BatchingQueue(batch_dim=0, maximum_batch_size=1, maximum_queue_size=1)
full.enqueue(x)
try:
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.stderr, run.returncode) == ("interrupted\n", "", 0)


def test_waiting_takes_no_processor_time():
    queue = BatchingQueue(batch_dim=0)
    with run_in_threads(*[lambda: next(queue, None)] * 8):
        start = time.process_time()
        time.sleep(0.5)
        spent = time.process_time() - start
        queue.close()
    assert spent < 0.1


@pytest.mark.parametrize(
    "end", [pytest.param("pass", marks=pytest.mark.slow), "sys.closer = Closer()"]
)
def test_the_interpreter_ends_while_threads_wait_and_tensors_live(end):
    """Even when something wakes the threads at the last moment, too late to return to Python."""
    program = f"""
import sys, threading, time, torch
from libtorchbeast import BatchingQueue, DynamicBatcher
queue, batcher = BatchingQueue(batch_dim=0), DynamicBatcher(batch_dim=0)
queue.enqueue(torch.zeros(1, 100_000))
batch = next(queue)
class Closer:
    def __del__(self, queue=queue, batcher=batcher, sleep=time.sleep):
        queue.close()
        batcher.close()
        sleep(0.2)  # Gives the threads time to do harm.
{end}
for call in (lambda: next(queue), lambda: batcher.compute(torch.zeros(1))):
    threading.Thread(target=call, daemon=True).start()
waiting = next(batcher)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")


def test_size_is_seen_by_other_threads():
    queue = BatchingQueue(batch_dim=0)
    with run_in_threads(lambda: queue.enqueue(rows(1, 2))):
        wait_until(lambda: queue.size() == 2)
