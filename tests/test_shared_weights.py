"""Weights in shared memory: whole versions only, from any process."""

import itertools
import multiprocessing as mp
import threading

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

from tests.helpers.specs import spec_for
from torchbeast.models import make_model
from torchbeast.runtime import shared_weights
from torchbeast.runtime.shared_weights import SharedWeights


def test_a_fetch_brings_what_was_published():
    ours, theirs = (make_model("shallow", spec_for((4, 84, 84), 6), True) for _ in range(2))
    weights = SharedWeights(ours)
    weights.publish(ours, version=7)
    assert weights.fetch(theirs) == 7
    for name, value in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value)


def test_state_of_every_dtype_travels():
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)  # has an integer among its state
    ours(torch.randn(8, 3))
    weights = SharedWeights(ours)
    weights.publish(ours, version=1)
    weights.fetch(theirs)
    assert theirs.num_batches_tracked.item() == 1
    assert torch.equal(theirs.running_mean, ours.running_mean)


def test_what_is_in_no_checkpoint_travels_too():
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    for model, value in ((ours, 1.0), (theirs, 0.0)):
        model.register_buffer("mean", torch.full((), value), persistent=False)
    weights = SharedWeights(ours)
    weights.publish(ours, version=1)
    weights.fetch(theirs)
    assert theirs.mean == 1.0


def _read(weights, count, result):
    model = nn.Linear(300, 300)
    version, bad = -1, 0
    for _ in range(count):
        version_before, version = version, weights.fetch(model)
        whole = (model.weight == version).all() and (model.bias == version).all()
        bad += not (whole and version >= version_before)
    result.send((bad, version))


@pytest.mark.slow
def test_no_reader_sees_a_mixture_of_versions():
    """Each version has one number everywhere; readers in another process check every fetch."""
    model = nn.Linear(300, 300)
    weights = SharedWeights(model)
    _fill(model, 0)
    weights.publish(model, version=0)
    context = mp.get_context("spawn")
    result, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(weights, 200, theirs))
    reader.start()
    version = 0
    while not result.poll(timeout=0.001):  # an update takes a while in real life, too
        version += 1
        _fill(model, version)
        weights.publish(model, version)
    bad, last = result.recv()
    reader.join(30)
    assert bad == 0
    assert last > 0


def _fill(model, version):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


def test_a_learner_that_died_in_its_copy_blocks_nobody_for_ever():
    model = nn.Linear(2, 2)
    weights = SharedWeights(model)
    weights.publish(model, version=0)
    weights._begun[0] = 1  # and never finished
    _fill(model, 1)
    with pytest.raises(TimeoutError):
        weights.fetch(model, timeout_s=0.1)
    thread = threading.Timer(0.1, weights.publish, (model, 1))
    thread.start()
    assert weights.fetch(model, timeout_s=10) == 1
    thread.join()


def test_weights_that_are_there_already_are_not_copied():
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    weights = SharedWeights(ours)
    with pytest.raises(TimeoutError):  # nothing is published yet
        weights.fetch(theirs, timeout_s=0)
    weights.publish(ours, version=3)
    assert weights.fetch(theirs) == 3
    weights._memory[64:] = 0
    assert weights.fetch(theirs, have=3) == 3
    assert torch.equal(theirs.weight, ours.weight)


# --- Any order of stores ----------------------------------------------------------------------


def memory_at_each_fence(monkeypatch):
    """Shared weights, and what stands in their memory as two versions are published after another:
    before, at each of the writer's fences, and after."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    weights = SharedWeights(model)
    weights.publish(model, 1)
    memories = [weights._memory.clone()]
    with monkeypatch.context() as patch:
        patch.setattr(shared_weights, "fence", lambda: memories.append(weights._memory.clone()))
        for version in (2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.001 * torch.randn(parameter.shape))
            weights.publish(model, version)
            memories.append(weights._memory.clone())
    assert len(memories) == 7
    return weights, memories


def seen(memories, random, first, last):
    """Memory as a processor may see it that loads each word at some time from `first` to `last`:
    between two of the writer's fences its stores become visible in any order."""
    words = torch.stack([memory.view(-1, 8) for memory in memories])
    times = torch.tensor([random.randint(first, last) for _ in range(words.shape[1])])
    return words[times, torch.arange(words.shape[1])].flatten()


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(random=strategies.randoms(use_true_random=False))
def test_no_order_in_which_stores_become_visible_makes_a_mixture(random):
    with pytest.MonkeyPatch.context() as monkeypatch:
        weights, memories = memory_at_each_fence(monkeypatch)
        whole = {1: memories[0], 2: memories[3], 3: memories[6]}
        # A reader looks at the version, copies, and looks again; its fences keep that order.
        times = sorted(random.randint(0, 6) for _ in range(4))
        views = [seen(memories, random, first, last) for first, last in itertools.pairwise(times)]
        weights._memory.copy_(views.pop(0))
        monkeypatch.setattr(shared_weights, "fence", lambda: weights._memory.copy_(views.pop(0)))
        model = nn.Linear(5, 3)
        try:
            version = weights.fetch(model, timeout_s=0)
        except TimeoutError:
            assert times[0] < times[-1] or times[0] % 3  # whole versions that stand still are taken
            return
        assert not views  # there were two fences
    expected = nn.Linear(5, 3)
    weights._memory.copy_(whole[version])
    weights.fetch(expected)
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(model.bias, expected.bias)


@pytest.mark.parametrize("at", [0, 3, 6])
def test_whole_versions_are_taken(at, monkeypatch):
    weights, memories = memory_at_each_fence(monkeypatch)
    weights._memory.copy_(memories[at])
    assert weights.fetch(nn.Linear(5, 3), timeout_s=0) == 1 + at // 3


@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_versions_that_are_being_written_are_not_taken(at, monkeypatch):
    weights, memories = memory_at_each_fence(monkeypatch)
    weights._memory.copy_(memories[at])
    with pytest.raises(TimeoutError):
        weights.fetch(nn.Linear(5, 3), timeout_s=0)
