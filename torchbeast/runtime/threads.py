"""Threads that are joined by their owner, and how busy they are. Used by both beasts."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from torchbeast.core.stats import RunningStats
from torchbeast.core.work_log import WorkLog

Item = TypeVar("Item")


def set_cpu_threads(number: int) -> None:
    """Set the number of cores that PyTorch may use for the calling thread's computations.

    A thread copies the process's number when it first reads it, and has its own only from then on:
    so it is read first.
    """
    torch.get_num_threads()
    torch.set_num_threads(number)


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """The same while entered; for a few rows at a time, one core is enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Threads:
    """Some threads that run one function; `finished` is set when one of them fails."""

    def __init__(
        self, name: str, number: int, target: Callable[[], None], finished: threading.Event
    ) -> None:
        self._target = target
        self._finished = finished
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until they have ended (else TimeoutError), and raise what one of them has raised."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and self._error is None:
                raise TimeoutError(f"Thread {thread.name} did not end within {timeout_s:.0f} s.")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._target()
        except BaseException as error:
            self._error = self._error or error
            self._finished.set()


def watch(name: str, items: Iterable[Item], stats: RunningStats | None) -> Iterator[Item]:
    """Yield the items, and report what part of its time the calling thread waits for them.

    The part is `<name>_idle` in the statistics; the time of work is recorded in `stats.work[name]`.
    """
    work = WorkLog() if stats is None else stats.work[name]
    iterator = iter(items)
    ended_at = time.monotonic()
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        waited_s = time.monotonic() - ended_at
        with work.at_work():
            yield item
        now = time.monotonic()
        if stats is not None and now > ended_at:
            stats.observe({f"{name}_idle": waited_s / (now - ended_at)})
        ended_at = now
