"""Records when threads are at work. Threads write, the main thread reads."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class WorkLog:
    """The work of threads of one kind."""

    def __init__(self) -> None:
        self.num_done = 0
        """Pieces of work that have ended."""
        self._lock = threading.Lock()
        self._begun_at: dict[int, float] = {}  # by thread
        self._threads: set[int] = set()
        self._done_s = 0.0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Wrap one piece of work of the calling thread."""
        me = threading.get_ident()
        with self._lock:
            self._threads.add(me)
            self._begun_at[me] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._done_s += time.monotonic() - self._begun_at.pop(me)
                self.num_done += 1

    @property
    def num_running(self) -> int:
        return len(self._begun_at)

    @property
    def running_s(self) -> float:
        """Seconds since the oldest piece of work in progress began; 0 if there is none."""
        with self._lock:
            now = time.monotonic()
            return max((now - begun for begun in self._begun_at.values()), default=0.0)

    @property
    def mean_s(self) -> float:
        """Seconds of work so far, averaged over the threads."""
        with self._lock:
            now = time.monotonic()
            running = sum(now - begun for begun in self._begun_at.values())
            return (self._done_s + running) / max(1, len(self._threads))
