"""Weights in shared memory: whole versions only, from any process."""

import multiprocessing as mp
import threading

import pytest
import torch
from torch import nn

from torchbeast.core.weights import SharedWeights
from torchbeast.models import make_model


def test_a_fetch_brings_what_was_published():
    ours, theirs = (make_model("shallow", (4, 84, 84), 6, True) for _ in range(2))
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


def _read(weights, count, result):
    model = nn.Linear(300, 300)
    version, bad = -1, 0
    for _ in range(count):
        version_before, version = version, weights.fetch(model)
        whole = (model.weight == version).all() and (model.bias == version).all()
        bad += not (whole and version >= version_before)
    result.send((bad, version))


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
    weights._begun.fill_(1)  # version 1 was begun and never done
    with pytest.raises(TimeoutError):
        weights.fetch(model, timeout_s=0.1)
    thread = threading.Timer(0.1, weights.publish, (model, 1))
    thread.start()
    assert weights.fetch(model, timeout_s=10) == 1
    thread.join()
