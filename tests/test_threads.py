"""Threads of one process and the cores that they may use."""

import threading
import time

import torch

from libtorchbeast import wait_notice
from tests.helpers.threads import run_in_threads, wait_until
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


def test_what_takes_long_says_so_every_now_and_then(caplog, monkeypatch):
    monkeypatch.setattr(wait_notice, "SAY_S", 0.01)
    monkeypatch.setattr(wait_notice, "SAY_AGAIN_S", 0.01)
    before = threading.active_count()
    with wait_notice.say_if_slow("Making one of Slow-v0"):
        wait_until(lambda: caplog.text.count("Making one of Slow-v0 takes long: 0 s so far.") >= 2)
    assert threading.active_count() == before
    caplog.clear()
    monkeypatch.setattr(wait_notice, "SAY_S", 60.0)
    started_at = time.monotonic()
    with wait_notice.say_if_slow("Nothing"):
        pass
    assert time.monotonic() - started_at < 30
    assert not caplog.text
