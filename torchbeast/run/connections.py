"""<rundir>/connections.csv: a run's clients, and how many steps are learnt from each.

`train` counts batches on their way to the learner; `python -m torchbeast.status` shows the file.
"""

import contextlib
import csv
import datetime
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from libtorchbeast.rpc.connected_clients import ClientFigures

FILE = "connections.csv"
WRITE_S = 5.0
COLUMNS = (
    "name", "address", "streams", "environments", "steps", "share", "lag", "unsent", "refused",
    "lost", "since",
)  # fmt: skip
OF_CLIENTS = ("name", "address", "streams", "environments", "unsent", "refused", "lost")
OWN = "(the learner's own)"


@dataclass
class _Learnt:
    """What has been learnt from one client."""

    steps: int = 0
    recent_steps: int = 0  # since the file was written
    recent_lag: int = 0  # policy lag, summed over these steps


class Connections:
    """The learner's queue, which also counts the steps of each client. For any thread."""

    def __init__(
        self,
        queue: Any,
        folder: Path,
        version: Callable[[], int],
        client_of: Callable[[int], str],
        clients: Callable[[], Sequence[ClientFigures]],
    ) -> None:
        """`version()` is the learner's; `client_of(source)` an environment's client, '' for own."""
        self._queue = queue
        self._path = folder / FILE
        self._version = version
        self._client_of = client_of
        self._clients = clients
        self._lock = threading.Lock()
        self._learnt: dict[str, _Learnt] = defaultdict(_Learnt)
        self._write_at = 0.0
        self.had_clients = False
        """Whether anything has been learnt from a client's environments."""

    def __iter__(self) -> "Connections":
        return self

    def __next__(self) -> Any:
        batch = next(self._queue)
        (rows, outputs), _ = batch
        self._count(rows["source"][0], ~rows["truncated"][1:], outputs["version"][1:])
        return batch

    def size(self) -> int:
        return self._queue.size()

    def poll(self) -> None:
        """Write the file if it is time to; called a few times a second."""
        now = time.monotonic()
        if now < self._write_at:
            return
        self._write_at = now + WRITE_S
        clients = self._clients()
        if clients:  # without clients there is no file
            self._write(self._rows(clients))

    def _count(self, sources: Tensor, happened: Tensor, versions: Tensor) -> None:
        """Count a batch by client: sources [B], whether steps happened and versions [T, B]."""
        steps = happened.sum(dim=0).tolist()
        lags = ((self._version() - versions) * happened).sum(dim=0).tolist()
        with self._lock:
            for source, num_steps, lag in zip(sources.tolist(), steps, lags, strict=True):
                client = self._client_of(source)
                self.had_clients = self.had_clients or bool(client)
                learnt = self._learnt[client]
                learnt.steps += num_steps
                learnt.recent_steps += num_steps
                learnt.recent_lag += lag

    def _rows(self, clients: Sequence[ClientFigures]) -> list[dict[str, Any]]:
        known = {figures.key: figures for figures in clients}
        rows = []
        with self._lock:
            total = sum(learnt.recent_steps for learnt in self._learnt.values())
            for key in sorted({*known, *self._learnt}):
                learnt = self._learnt[key]
                recent, figures = learnt.recent_steps, known.get(key)
                row: dict[str, Any] = {"name": key or OWN, "steps": learnt.steps}
                row["share"] = f"{recent / total:.3f}" if total else ""
                row["lag"] = f"{learnt.recent_lag / recent:.1f}" if recent else ""
                if figures is not None:
                    row |= {field: getattr(figures, field) for field in OF_CLIENTS}
                    since = datetime.datetime.fromtimestamp(figures.since)
                    row["since"] = since.isoformat(" ", "seconds")
                rows.append(row)
                learnt.recent_steps = learnt.recent_lag = 0
                if key and not recent and figures is None:  # the client has left
                    del self._learnt[key]
        return rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file atomically. A full disk does not end a run."""
        beside = self._path.with_name(f".{FILE}")
        with contextlib.suppress(OSError):
            with beside.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
            os.replace(beside, self._path)
