"""Weights in shared memory: whole versions only, from any process."""

import multiprocessing as mp
import threading

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import nn

from tests.helpers.specs import spec_for
from torchbeast.models import make_model
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
    weights._memory[-64] ^= 1  # version 1 was begun and never done
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


# --- Torn writes ------------------------------------------------------------------------------


def two_versions():
    """Shared weights, and what stands in their memory after each of two publications."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    weights = SharedWeights(model)
    images = []
    for version in (1, 2):
        weights.publish(model, version)
        images.append(weights._memory.clone())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.001 * torch.randn(parameter.shape))
    return weights, *images


def is_refused(weights, memory):
    """Whether a reader keeps its own weights rather than take those that it sees."""
    weights._memory.copy_(memory)
    model = nn.Linear(5, 3)
    before = model.weight.detach().clone()
    try:
        weights.fetch(model, timeout_s=0)
    except TimeoutError:
        return torch.equal(model.weight, before)
    return False


def is_whole(memory, images):
    return any(torch.equal(memory, image) for image in images)


def test_stores_that_become_visible_in_their_order_or_backwards_are_no_version():
    weights, *images = two_versions()
    for old, new in (images, images[::-1]):
        for cut in range(len(old) + 1):
            torn = torch.cat([new[:cut], old[cut:]])
            assert is_refused(weights, torn) != is_whole(torn, images), cut


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(strategies.randoms(use_true_random=False), strategies.sampled_from([1, 4, 8, 64]))
def test_stores_that_become_visible_in_any_order_are_no_version(random, num_bytes):
    """As on ARM: each word, cache line or byte is of this version or of that."""
    weights, old, new = two_versions()
    torn = old.clone()
    for start in range(0, len(old), num_bytes):
        if random.random() < 0.5:
            torn[start : start + num_bytes] = new[start : start + num_bytes]
    assert is_refused(weights, torn) != is_whole(torn, (old, new))


def test_whole_versions_are_taken():
    weights, old, new = two_versions()
    for image in (old, new):
        assert not is_refused(weights, image)
