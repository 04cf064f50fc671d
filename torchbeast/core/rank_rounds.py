"""Rounds: when the learners of a run make an update together, and with whose rollouts.

Every update begins with a round: each rank reports whether it has a batch, and all ranks decide
alike, by the reports of all. A rank without a batch takes part, too, a few times a second, so that
no rank waits for long in a round, and those with a batch can go on without those that have none.
"""

import enum
import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from libtorchbeast.log_repeats import RepeatFilter
from torchbeast.core.ranks import Ranks

logger = logging.getLogger("torchbeast")

IDLE_ROUND_S = 0.1  # between two rounds of a rank without a batch
PATIENCE_S = 1.0  # minimum time to wait for a rank that took part in the last update


class Decision(enum.Enum):
    WAIT = enum.auto()  # have another round
    GO = enum.auto()
    STOP = enum.auto()


class Stop(Protocol):
    signal: int | None
    """The signal that asked to stop, or None."""

    @property
    def exit_code(self) -> int: ...


class Rounds:
    """The rounds of one rank. For one thread at a time: the one that holds the learner's lock."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._awaited = set(range(ranks.size))
        self._began_at = self._met_at = time.monotonic()
        self._ready_at: float | None = None
        self._repeats = RepeatFilter()
        self.stop: Stop | None = None
        """This rank's request to stop; all ranks stop together."""
        self.had_clients: Callable[[], bool] = bool
        """Says whether this rank has learnt from clients' environments."""
        self.any_clients = False
        """Whether any rank had, in the last round."""

    @property
    def stops_alone(self) -> bool:
        """Whether this rank may stop as soon as it is asked to."""
        return self._ranks.size == 1

    @property
    def idle_s(self) -> float:
        """Seconds since the last round."""
        return time.monotonic() - self._met_at

    def meet(self, has_batch: bool) -> Decision:
        """Have one round with all ranks; returns their decision.

        Ranks that took part in the last update are waited for, but not for longer than PATIENCE_S
        or the time that the fastest took for its batch, whichever is more. After that a late rank
        is no longer waited for, until it has a batch again.
        """
        now = time.monotonic()
        if has_batch and self._ready_at is None:
            self._ready_at = now
        ready_at = self._ready_at if has_batch and self._ready_at is not None else now
        signal = (self.stop.signal if self.stop else None) or 0
        said = [has_batch, ready_at - self._began_at, now - ready_at, signal, self.had_clients()]
        header = torch.tensor([float(number) for number in said], dtype=torch.float64)
        headers = self._ranks.gather(header).tolist()
        self._met_at = time.monotonic()
        self.any_clients = any(clients for *_, clients in headers)
        signal = int(max(header[3] for header in headers))
        if signal and not self.stops_alone:
            if self.stop is not None:
                self.stop.signal = self.stop.signal or signal
            return Decision.STOP
        ready = {rank for rank, header in enumerate(headers) if header[0]}
        if not ready:
            return Decision.WAIT
        if late := self._awaited - ready:
            took_s = min(headers[rank][1] for rank in ready)
            waited_s = max(headers[rank][2] for rank in ready)
            if waited_s < max(PATIENCE_S, took_s):
                return Decision.WAIT
            self._report_late(late, waited_s)
        self._awaited = ready
        self._began_at, self._ready_at = self._met_at, None
        return Decision.GO

    def _report_late(self, late: set[int], waited_s: float) -> None:
        if self._ranks.rank > 0:
            return
        who = ", ".join(str(rank) for rank in sorted(late))
        text = self._repeats.take(f"No rollouts from learner {who}", key=who)
        if text is not None:
            logger.warning("%s for %.1f s; the others go on, and it joins in when it has some.",
                           text, waited_s)  # fmt: skip
