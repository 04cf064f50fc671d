"""Reports a run's figures to terminal, TensorBoard and CSV. Used by the main thread alone."""

import time
from collections.abc import Callable
from types import TracebackType

from torchbeast.core.file_writer import FileWriter
from torchbeast.core.stats import RunningStats
from torchbeast.report.tensorboard import TensorBoard
from torchbeast.report.terminal import STALL_S, Figures, make_view
from torchbeast.runtime.disk_errors import IgnoreWriteErrors

FIRST_VIEW_S = 1.0
FIRST_ROW_S = 0.2
ROWS_APART = 0.05  # pause between rows, as a part of the time since the first one, at the start


def say_nothing(seconds: float) -> str:
    """The explanation of a time without steps if there is none: an empty one."""
    return ""


class Reporter:
    """Reports at most once in `log_interval_s`. A context manager.

    At the start, rows of CSV and TensorBoard are more frequent, so that a run of seconds has a
    curve.
    """

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
        now, step = time.monotonic(), stats.step
        self._first_row_at: float | None = None
        self._row_at, self._row_step = now, step
        self._row_due = now + min(FIRST_ROW_S, log_interval_s)
        self._view_at, self._view_step = now, step
        self._view_due = now + min(FIRST_VIEW_S, log_interval_s)
        self._moved_at, self._moved_to = now, step
        self._newest: Figures = {}  # for the view, as each row resets the means

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
            if self._stats.step > self._view_step:
                self._view_due = 0.0
                self._log()
        finally:
            self._view.stop()
            with self._for_tensorboard:
                self._tensorboard.close()
            with self._for_csv:
                self._writer.close(successful=error is None)

    def update(self, explain: Callable[[float], str] = say_nothing) -> None:
        """Log if it is time; if there were no steps for a while, show what `explain` returns."""
        step, now = self._stats.step, time.monotonic()
        self._view.tick(step)
        if now >= self._row_due and step > self._row_step:
            self._log()
        if step > self._moved_to:
            self._moved_at, self._moved_to = now, step
        seconds = now - self._moved_at
        self._view.stall(seconds, explain(seconds) if seconds >= STALL_S else "")

    def _log(self) -> None:
        now, step = time.monotonic(), self._stats.step
        figures = self._stats.summary()
        self._newest |= figures
        if now >= self._view_due:
            speed = (step - self._view_step) / (now - self._view_at)
            self._view.show({**self._newest, "sps": speed})
            self._view_at, self._view_step, self._view_due = now, step, now + self._interval_s
        if step == self._row_step:
            return
        figures["sps"] = (step - self._row_step) / (now - self._row_at)
        self._row_at, self._row_step = now, step
        self._first_row_at = self._first_row_at or now
        pause_s = max(FIRST_ROW_S, ROWS_APART * (now - self._first_row_at))
        self._row_due = now + min(pause_s, self._interval_s)
        with self._for_csv:
            self._writer.log(figures)
        with self._for_tensorboard:
            self._tensorboard.log(figures, step)
