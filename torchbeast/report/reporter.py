"""Passes a run's figures on to all who show or keep them. Used by the main thread alone."""

import time
from collections.abc import Callable
from types import TracebackType

from torchbeast.core.file_writer import FileWriter
from torchbeast.core.stats import RunningStats
from torchbeast.report.tensorboard import TensorBoard
from torchbeast.report.terminal import STALL_S, make_view
from torchbeast.runtime.disk import IgnoreWriteErrors

FIRST_LOG_S = 1.0
MAX_NAMED = 4  # of those who are late


class Reporter:
    """Terminal, TensorBoard and CSV, at most once in `log_interval_s`. Use it with `with`."""

    def __init__(
        self, writer: FileWriter, stats: RunningStats, total_steps: int, log_interval_s: float
    ) -> None:
        self._interval_s = log_interval_s
        self._writer = writer
        self._stats = stats
        self._view = make_view(total_steps)
        self._tensorboard = TensorBoard(writer.basepath, stats.step)
        self._for_csv = IgnoreWriteErrors("logs.csv")
        self._for_tensorboard = IgnoreWriteErrors("TensorBoard's file")
        self._last_time = time.monotonic()
        self._last_step = stats.step
        self._due = self._last_time + min(FIRST_LOG_S, self._interval_s)
        self._moved_at, self._moved_to = self._last_time, stats.step

    def __enter__(self) -> "Reporter":
        self._view.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._stats.step > self._last_step:
                self._log()
        finally:
            self._view.stop()
            with self._for_tensorboard:
                self._tensorboard.close()
            with self._for_csv:
                self._writer.close(successful=error is None)

    def update(self, late: Callable[[], list[str]] = list) -> None:
        """Log if it is time, and say who is `late` if nothing moves."""
        step, now = self._stats.step, time.monotonic()
        self._view.tick(step)
        if now >= self._due and step > self._last_step:
            self._log()
        if step > self._moved_to:
            self._moved_at, self._moved_to = now, step
        seconds = now - self._moved_at
        self._view.stall(seconds, _why(late()) if seconds >= STALL_S else "")

    def _log(self) -> None:
        now = time.monotonic()
        figures = self._stats.summary()
        figures["sps"] = (self._stats.step - self._last_step) / (now - self._last_time)
        self._last_time, self._last_step, self._due = now, self._stats.step, now + self._interval_s
        self._view.show(figures)
        with self._for_csv:
            self._writer.log(figures)
        with self._for_tensorboard:
            self._tensorboard.log(figures, self._stats.step)


def _why(late: list[str]) -> str:
    """Why nothing moves, for people."""
    if not late:
        return "no environment hangs; they are slow, or an update takes long."
    more = [f"{len(late) - MAX_NAMED} more"] if len(late) > MAX_NAMED else []
    return f"waiting for {', '.join([*late[:MAX_NAMED], *more])}."
