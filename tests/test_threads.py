"""Threads of one process and the cores that they may use."""

import threading

import torch

from tests.helpers.threads import run_in_threads
from torchbeast.runtime.threads import set_cpu_threads


def test_each_thread_has_a_number_of_cores_of_its_own():
    everybody = threading.Barrier(2)
    numbers = {}

    def work(number):
        set_cpu_threads(number)
        everybody.wait(30)  # the other one has set its number, too
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)
        numbers[number] = torch.get_num_threads()

    with run_in_threads(lambda: work(1), lambda: work(3)):
        pass
    assert numbers == {1: 1, 3: 3}
