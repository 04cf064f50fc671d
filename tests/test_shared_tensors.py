"""Tensors that processes share: the same memory, whatever way a process is started."""

import gc
import multiprocessing
import re
from pathlib import Path

import pytest
import torch

from libtorchbeast.shared_memory import ALIGNMENT
from torchbeast.runtime.shared_tensors import SharedTensors, TensorSpec, shared_zeros

SPECS = {
    "frame": {"camera": TensorSpec((3, 2), torch.uint8), "none": TensorSpec((0, 4), torch.float32)},
    "states": (TensorSpec((5,), torch.float64), TensorSpec((), torch.bool)),
}


def write(shared, connection):
    """In another process."""
    shared.tensors["frame"]["camera"][1] = 7
    shared.tensors["states"][0].add_(0.5)
    connection.send(bool(shared.tensors["states"][1]))
    connection.recv()
    shared.tensors["states"][0].add_(1.0)
    connection.send(None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_another_process_sees_the_same_memory(method):
    context = multiprocessing.get_context(method)
    shared = SharedTensors(SPECS)
    shared.tensors["states"][1].fill_(True)
    ours, theirs = context.Pipe()
    process = context.Process(target=write, args=(shared, theirs))
    process.start()
    try:
        assert ours.recv() is True
        assert shared.tensors["frame"]["camera"].tolist() == [[0, 0], [7, 7], [0, 0]]
        assert shared.tensors["states"][0].tolist() == [0.5] * 5
        ours.send(None)
        ours.recv()
        assert shared.tensors["states"][0].tolist() == [1.5] * 5
    finally:
        process.join(60)
    assert process.exitcode == 0


def test_tensors_are_zeros_with_the_shapes_and_dtypes_asked_for_side_by_side():
    tensors = SharedTensors(SPECS).tensors
    leaves = [tensors["frame"]["camera"], tensors["frame"]["none"], *tensors["states"]]
    assert [tuple(leaf.shape) for leaf in leaves] == [(3, 2), (0, 4), (5,), ()]
    assert [leaf.dtype for leaf in leaves] == [
        torch.uint8,
        torch.float32,
        torch.float64,
        torch.bool,
    ]
    assert not any(leaf.any() for leaf in leaves)
    for leaf in leaves:
        leaf.fill_(1)
    assert all((leaf == 1).all() for leaf in leaves)
    assert all(leaf.data_ptr() % ALIGNMENT == 0 for leaf in leaves if leaf.numel())


def test_memory_is_given_back_with_the_tensors():
    def num_mapped():
        return len(re.findall("torchbeast-tensors", Path("/proc/self/maps").read_text()))

    def num_open():
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what other tests left
    mapped, opened = num_mapped(), num_open()
    shared = shared_zeros((1000, 1000), torch.float32)
    assert num_mapped() == mapped + 1
    view = shared.tensors[3]
    del shared
    assert view.sum() == 0  # whoever has a tensor keeps the memory
    del view
    assert num_mapped() <= mapped  # fewer, if something of an earlier test has gone meanwhile
    assert num_open() <= opened
