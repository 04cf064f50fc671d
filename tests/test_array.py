"""Arrays of the core: every dtype, any strides, no copies, clear refusals."""

import gc
import subprocess
import sys
import weakref

import numpy as np
import psutil
import pytest
import torch

import libtorchbeast
from libtorchbeast import Array

NAMES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
# Newer names, where this PyTorch can hand them over at all.
for name in ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2"]:
    try:
        torch.empty(1, dtype=getattr(torch, name)).__dlpack__()
    except (AttributeError, BufferError, RuntimeError, TypeError):
        continue
    NAMES.append(name)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_goes_in_and_out_without_a_copy(name):
    tensor = torch.empty(2, 3, dtype=getattr(torch, name))
    array = Array(tensor)
    assert array.dtype == name
    assert array.shape == [2, 3]
    result = array.torch()
    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    assert result.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_can_be_batched(name):
    dtype = getattr(torch, name)
    size = torch.empty(1, dtype=dtype).element_size()
    data = torch.randint(2, (2, 3 * size), dtype=torch.uint8)
    queue = libtorchbeast.BatchingQueue(batch_dim=0, minimum_batch_size=4)
    for _ in range(2):
        queue.enqueue(data.view(dtype))
    batch = next(queue)
    assert batch.dtype == dtype
    assert batch.shape == (4, 3)
    assert torch.equal(batch.view(torch.uint8), torch.cat([data, data]))


@pytest.mark.parametrize(
    "dtype",
    ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"],
    ids=str,
)
def test_numpy_arrays_go_in_without_a_copy(dtype):
    array = np.ones((2, 3), dtype=dtype)
    tensor = Array(array).torch()
    assert tensor.data_ptr() == array.ctypes.data
    assert np.array_equal(tensor.numpy(), array)
    assert tensor.numpy().dtype == array.dtype


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::2],
        lambda x: x[:, 1:3],
        lambda x: x.swapaxes(0, 1),
        lambda x: x[..., None],
        lambda x: x[1:1],
        lambda x: x[0, 0],
    ],
)
def test_views_arrive_right(view):
    array = np.arange(24, dtype=np.int32).reshape(4, 6)
    assert np.array_equal(Array(view(array)).torch().numpy(), view(array))
    tensor = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    assert torch.equal(Array(view(tensor)).torch(), view(tensor))
    assert Array(view(tensor)).torch().data_ptr() == view(tensor).data_ptr()


def test_numpy_arrays_that_run_backwards_or_repeat_arrive_right():
    array = np.arange(6, dtype=np.float32)
    assert Array(array[::-2]).torch().tolist() == [5, 3, 1]
    assert Array(np.broadcast_to(array[:2], (2, 2))).torch().tolist() == [[0, 1], [0, 1]]


def test_a_read_only_array_goes_in():
    array = np.arange(3)
    array.flags.writeable = False
    assert Array(array).torch().tolist() == [0, 1, 2]


def test_an_array_keeps_its_memory_alive():
    tensor = torch.arange(5)
    array = Array(tensor)
    del tensor
    result = array.torch()
    del array
    assert result.tolist() == [0, 1, 2, 3, 4]

    owner = np.arange(5)
    gone = weakref.ref(owner)
    result = Array(owner).torch()
    del owner
    assert gone() is not None
    del result  # Torch lets go of memory without the interpreter lock.
    Array(np.arange(1))  # Any call from Python does what needed the lock.
    assert gone() is None


@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_a_conjugation_or_a_sign_that_is_put_off_is_seen(name):
    lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
    lazy = lazy if name == "complex64" else lazy.imag
    assert torch.equal(Array(lazy).torch(), lazy)


def test_a_tensor_that_requires_grad_is_refused():
    for tensor in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))):
        with pytest.raises(ValueError, match=r"must not require grad.*\[2\].*detach"):
            Array(tensor)
    assert Array(torch.nn.Parameter(torch.ones(2), requires_grad=False)).shape == [2]


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(ValueError, match=r"must live on the CPU, got one on meta.*\.cpu\(\)"):
        Array(torch.ones(2, device="meta"))


def test_a_sparse_tensor_is_refused():
    with pytest.raises(ValueError, match=r"must be dense.*sparse.*to_dense"):
        Array(torch.eye(2).to_sparse())


@pytest.mark.parametrize("leaf", [None, 1, 2.0, "text", object()])
def test_other_leaves_are_refused(leaf):
    with pytest.raises(TypeError, match=f"got {type(leaf).__name__}"):
        Array(leaf)


def test_arrays_that_torch_does_not_know_are_refused():
    for array in (np.zeros(2, ">f4"), np.zeros(2, [("a", "i4")]), np.zeros(2, "g")):
        with pytest.raises(TypeError, match=r"native byte order.*astype"):
            Array(array)
    odd = np.zeros(2, [("a", "u1"), ("b", "f4")])["b"]
    with pytest.raises(ValueError, match=r"whole elements.*ascontiguousarray"):
        Array(odd)


@pytest.mark.slow
def test_the_slow_exchange_works_as_the_fast_one():
    """PyTorch before 2.10 has no exchange in C; this one is made to look as if it had none."""
    program = """
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
import pytest, test_array
arguments = ["-q", "-p", "no:cacheprovider", test_array.__file__, "-k", "not slow"]
raise SystemExit(pytest.main(arguments))
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_reference_or_memory_is_leaked():
    tensor, array = torch.zeros(1000), np.zeros(1000)

    def operate(times):
        for _ in range(times):
            Array(tensor).torch()
            Array(array).torch()
            Array(array[::-1]).torch()

    def references():
        Array(array)
        gc.collect()
        return sys.getrefcount(tensor), sys.getrefcount(array)

    operate(1000)
    before, blocks = references(), sys.getallocatedblocks()
    memory = psutil.Process().memory_info().rss
    operate(100_000)
    assert references() == before
    assert sys.getallocatedblocks() - blocks < 1000
    assert psutil.Process().memory_info().rss - memory < 8 << 20
