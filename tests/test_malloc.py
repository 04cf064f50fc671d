"""Memory that was freed is there again without the kernel's help, in every thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
import torch
from libtorchbeast.malloc import keep_freed_memory

def touch():
    torch.zeros({megabytes} << 20, dtype=torch.uint8)

def count_faults():
    for _ in range(30):  # aligned blocks find their place after a while
        touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        touch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(1)
assert {keep} == 0 or keep_freed_memory()
thread = threading.Thread(target=count_faults)
thread.start()
thread.join()
"""


def num_faults(megabytes: int, keep: bool) -> int:
    program = PROGRAM.format(megabytes=megabytes, keep=int(keep))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
@pytest.mark.parametrize(
    "megabytes", [20, pytest.param(100, marks=pytest.mark.slow)]
)  # of 64 MiB is a thread's own heap
def test_large_blocks_of_threads_are_kept(megabytes):
    pages = 10 * (megabytes << 20) // 4096
    assert num_faults(megabytes, keep=True) < pages / 100


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_without_it_they_go_back_each_time():
    assert num_faults(100, keep=False) > 10 * (100 << 20) // 4096 / 2
