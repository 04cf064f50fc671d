"""The file that every peer writes: time, agent steps, mean return of the last 100 whole games."""

import csv
import time
from collections import deque
from typing import Any

WINDOW = 100
PERIOD_S = 1.0


class Curve:
    """A CSV file that grows by one row a second at most."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._next = 0.0
        self._write("w", "time", "steps", "mean_return")

    def add_return(self, value: float) -> None:
        """Add the return of a whole game, with the game's own rewards."""
        self._returns.append(float(value))

    def add_row(self, steps: float) -> None:
        """Write a row if it is time for one; `steps` are the agent's."""
        now = time.time()
        if now >= self._next and self._returns:
            self._write("a", now, int(steps), sum(self._returns) / len(self._returns))
            self._next = now + PERIOD_S

    def _write(self, mode: str, *row: Any) -> None:
        with open(self._path, mode, newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
