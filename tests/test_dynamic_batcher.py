"""DynamicBatcher: one test for each promise, then many threads at once."""

import contextlib
import gc
import itertools
import sys
import threading

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libtorchbeast import AsyncError, Batch, ClosedBatchingQueue, DynamicBatcher
from tests.helpers.threads import run_in_threads, shortest_ms, wait_until

DROPPED = "The associated promise has been destructed prior to the associated state becoming ready."


def answer(batch, change=lambda x: x + 1):
    batch.set_outputs(change(batch.get_inputs()))


def test_arguments_are_taken_by_position_and_by_name():
    DynamicBatcher(1, 1, 1024, 100, True)
    DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=1024,
        timeout_ms=None,
        check_outputs=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minimum_batch_size": 0}, "Min batch size must be >= 1"),
        (
            {"minimum_batch_size": 2, "maximum_batch_size": 1},
            "Max batch size must be >= min batch size",
        ),
        ({"timeout_ms": -1}, "timeout_ms must be >= 0"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    with pytest.raises(ValueError, match=message):
        DynamicBatcher(**arguments)


def test_compute_blocks_and_returns_its_slice_of_the_outputs():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=3, maximum_batch_size=3)
    results = {}

    def compute(*values):
        results[values] = batcher.compute({"x": torch.tensor(values)})

    with run_in_threads(lambda: compute(1), lambda: compute(2, 3)):
        wait_until(lambda: batcher.size() == 3)
        batch = next(batcher)
        assert type(batch) is Batch
        assert batcher.size() == 0
        assert not results
        x = batch.get_inputs()["x"]
        batch.set_outputs(([x * 10], x * 100))
    assert {k: (a.tolist(), b.tolist()) for k, ([a], b) in results.items()} == {
        (1,): ([10], [100]),
        (2, 3): ([20, 30], [200, 300]),
    }


def test_the_default_batch_dimension_is_the_second():
    batcher = DynamicBatcher()
    inputs = torch.rand(2, 3, 4)
    with run_in_threads(lambda: answer(next(batcher))):
        assert torch.equal(batcher.compute(inputs), inputs + 1)


def test_outputs_may_be_numpy_arrays_and_empty_nests():
    batcher = DynamicBatcher(batch_dim=0)
    with run_in_threads(lambda: answer(next(batcher), lambda x: (np.array([5, 6]), ()))):
        result, state = batcher.compute(torch.zeros(2))
    assert result.tolist() == [5, 6]
    assert state == ()


def test_a_large_item_is_split_and_its_outputs_come_back_as_one():
    batcher = DynamicBatcher(batch_dim=1, maximum_batch_size=4)
    inputs = torch.rand(2, 10, 3)
    sizes = []

    def consume():
        # Taken in order, answered in reverse.
        batches = [next(batcher) for _ in range(3)]
        for batch in reversed(batches):
            sizes.append(batch.get_inputs().shape[1])
            answer(batch)

    with run_in_threads(consume):
        assert torch.equal(batcher.compute(inputs), inputs + 1)
    assert sizes == [2, 4, 4]


def test_outputs_of_the_parts_of_an_item_must_match():
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=1)

    def consume():
        answer(next(batcher), lambda x: x)
        answer(next(batcher), lambda x: [x])

    with run_in_threads(consume), pytest.raises(ValueError, match="nests don't match"):
        batcher.compute(torch.zeros(2))


@pytest.mark.parametrize("arguments", [{"timeout_ms": 200}, {}])
def test_a_timeout_hands_out_a_batch_smaller_than_the_minimum(arguments):
    timeout_ms = arguments.get("timeout_ms", 100)
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=5, maximum_batch_size=5, **arguments)

    def compute():
        with contextlib.suppress(ClosedBatchingQueue):
            while True:
                batcher.compute(torch.zeros(1))

    def get_batch():
        wait_until(lambda: batcher.size() == 1)
        answer(next(batcher))

    with run_in_threads(compute):
        waited_ms = shortest_ms(get_batch, timeout_ms * 1.1)
        batcher.close()
    assert timeout_ms <= waited_ms <= timeout_ms * 1.1


def test_a_dropped_batch_is_an_async_error():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2)

    def compute():
        with pytest.raises(AsyncError) as error:
            batcher.compute(torch.zeros(1))
        assert str(error.value) == DROPPED

    with run_in_threads(compute, compute):
        next(batcher)


def test_a_consumer_that_raises_drops_its_batch():
    batcher = DynamicBatcher(batch_dim=0)

    def consume():
        with contextlib.suppress(ZeroDivisionError):
            for _ in batcher:
                raise ZeroDivisionError

    with run_in_threads(consume), pytest.raises(AsyncError, match="promise"):
        batcher.compute(torch.zeros(1))


def test_an_exception_crosses_threads_whole():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=2)
    cause = KeyError("why")
    error = OSError(5, "what")
    error.__cause__ = cause
    raised = []

    def compute():
        try:
            batcher.compute(torch.zeros(1))
        except OSError as e:
            raised.append(e)

    with run_in_threads(compute, compute):
        next(batcher).set_exception(error)
    assert raised == [error, error]
    assert raised[0].errno == 5
    assert raised[0].__cause__ is cause
    with run_in_threads(lambda: batcher.compute(torch.zeros(2))):
        batch = next(batcher)
        with pytest.raises(TypeError, match="needs an exception"):
            batch.set_exception("text")
        answer(batch)


def test_set_outputs_twice_is_an_error():
    batcher = DynamicBatcher(batch_dim=0)
    with run_in_threads(lambda: batcher.compute(torch.zeros(1))):
        batch = next(batcher)
        answer(batch)
        with pytest.raises(RuntimeError, match="set_outputs called twice"):
            answer(batch)
        with pytest.raises(RuntimeError, match="set_outputs called twice"):
            batch.set_exception(ValueError())


def test_outputs_of_wrong_shape_are_refused_and_the_right_ones_can_still_be_set():
    batcher = DynamicBatcher(batch_dim=2)
    results = []
    with run_in_threads(lambda: results.append(batcher.compute(torch.zeros(1, 1, 2)))):
        batch = next(batcher)
        message = "With batch dimension 2, output shape must have at least 3"
        with pytest.raises(ValueError, match=message):
            batch.set_outputs(torch.zeros(1, 2))
        message = (
            "Output shape must have the same batch dimension as the input batch size. "
            "Expected: 2. Observed: 3"
        )
        with pytest.raises(ValueError, match=message):
            batch.set_outputs([torch.zeros(1, 1, 2), torch.zeros(1, 1, 3)])
        with pytest.raises(ValueError, match="must not require grad"):
            batch.set_outputs(torch.zeros(1, 1, 2, requires_grad=True))
        with pytest.raises(TypeError, match="got int"):
            batch.set_outputs((1, 2))
        batch.set_outputs(torch.ones(1, 1, 2))
    assert results[0].tolist() == [[[1, 1]]]


def test_inputs_are_checked():
    batcher = DynamicBatcher()
    with pytest.raises(ValueError, match="more than batch_dim == 1"):
        batcher.compute(torch.zeros(1))
    with pytest.raises(ValueError, match="Cannot enqueue empty vector of tensors"):
        batcher.compute([])
    assert batcher.size() == 0


def test_close_ends_those_who_compute():
    """Whether their rows still wait or are in a consumer's hands."""
    batcher = DynamicBatcher(batch_dim=0, maximum_batch_size=1)

    def compute():
        with pytest.raises(ClosedBatchingQueue):
            batcher.compute(torch.zeros(1))

    with run_in_threads(compute, compute):
        batch = next(batcher)
        wait_until(lambda: batcher.size() == 1)
        assert not batcher.is_closed()
        batcher.close()
        assert batcher.is_closed()
    answer(batch)  # Nobody listens, which is no reason to stumble.


def test_after_close():
    batcher = DynamicBatcher(batch_dim=0)
    batcher.close()
    assert list(batcher) == []
    with pytest.raises(ClosedBatchingQueue, match="closed queue"):
        batcher.compute(torch.zeros(1))
    with pytest.raises(RuntimeError, match="Queue was closed already"):
        batcher.close()


def test_close_wakes_every_consumer():
    batcher = DynamicBatcher(batch_dim=0)
    ended = []
    with run_in_threads(*[lambda: ended.append(list(batcher))] * 8):
        batcher.close()
    assert ended == [[]] * 8


def test_64_computing_and_16_consuming_lose_nothing():
    batcher = DynamicBatcher(batch_dim=0, minimum_batch_size=1, maximum_batch_size=32)
    count = itertools.count(1)

    def compute(caller):
        for i in range(100):
            value = caller * 100 + i
            assert batcher.compute(torch.tensor([[value]])).item() == value + 1
            if next(count) == 6400:
                batcher.close()

    def consume():
        for batch in batcher:
            answer(batch)

    callers = [lambda c=c: compute(c) for c in range(64)]
    with run_in_threads(*callers, *[consume] * 16):
        pass
    assert next(count) == 6401


@settings(deadline=None, max_examples=30)
@given(
    calls=st.lists(st.lists(st.integers(1, 5), max_size=10), min_size=1, max_size=6),
    num_consumers=st.integers(1, 4),
    maximum=st.integers(1, 8),
    fates=st.lists(st.sampled_from(["answer", "answer", "drop", "raise"]), min_size=1, max_size=5),
    close_after=st.none() | st.integers(1, 20),
)
def test_every_call_gets_its_own_answer_or_an_error(
    calls, num_consumers, maximum, fates, close_after
):
    """Consumers answer, drop or refuse batches in turn; somebody may close the batcher."""
    batcher = DynamicBatcher(
        batch_dim=0, minimum_batch_size=1, maximum_batch_size=maximum, timeout_ms=1
    )
    num_calls = sum(map(len, calls))
    last_call, lock = min(close_after or num_calls, num_calls), threading.Lock()
    count, fate = itertools.count(1), itertools.cycle(fates)
    seen, failed = [], []

    def close():
        with lock:
            if not batcher.is_closed():
                batcher.close()

    def compute(caller):
        row = 0
        for size in calls[caller]:
            inputs = torch.tensor([(caller, row + i) for i in range(size)])
            row += size
            try:
                assert torch.equal(batcher.compute(inputs), inputs + 1000)
            except (AsyncError, ClosedBatchingQueue, OSError) as error:
                failed.append(error)
            if next(count) == last_call:
                close()

    def consume():
        for batch in batcher:
            inputs = batch.get_inputs()
            assert 1 <= len(inputs) <= maximum
            seen.extend(map(tuple, inputs.tolist()))
            with lock:
                outcome = next(fate)
            if outcome == "answer":
                batch.set_outputs(inputs + 1000)
            elif outcome == "raise":
                batch.set_exception(OSError("refused"))
            del batch

    if num_calls == 0:
        close()
    callers = [lambda c=c: compute(c) for c in range(len(calls))]
    with run_in_threads(*callers, *[consume] * num_consumers):
        pass
    assert len(set(seen)) == len(seen), "a row came twice"
    if close_after is None and set(fates) == {"answer"}:
        assert not failed
        assert len(seen) == sum(map(sum, calls)), "a row was lost"


def test_no_memory_is_leaked():
    batcher = DynamicBatcher(batch_dim=0)
    array = np.zeros((1, 1000))
    inputs = {"a": (array, torch.zeros(1, 1000)), "b": torch.zeros(1)}

    def consume():
        fate = itertools.cycle(["drop", "raise", *["answer"] * 8])
        for batch in batcher:
            outcome = next(fate)
            if outcome == "raise":
                batch.set_exception(OSError())
            elif outcome == "answer":
                batch.set_outputs(batch.get_inputs())
            del batch

    def operate(times):
        for _ in range(times):
            with contextlib.suppress(AsyncError, OSError):
                batcher.compute(inputs)

    def references():
        gc.collect()
        return sys.getrefcount(array), sys.getrefcount(inputs["a"][1]), sys.getrefcount(OSError)

    with run_in_threads(consume):
        operate(1000)
        before, blocks = references(), sys.getallocatedblocks()
        memory = psutil.Process().memory_info().rss
        operate(10_000)
        after, blocks_after = references(), sys.getallocatedblocks()
        memory_after = psutil.Process().memory_info().rss
        batcher.close()
    # The last batch may still be in the consumer's hands at either moment.
    assert all(abs(a - b) <= 1 for a, b in zip(after, before, strict=True))
    assert blocks_after - blocks < 1000
    assert memory_after - memory < 8 << 20
