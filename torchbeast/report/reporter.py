"""Passes a run's figures on to all who show or keep them. Used by the main thread alone."""

import time
from types import TracebackType

from torchbeast.core.file_writer import FileWriter
from torchbeast.core.stats import RunningStats
from torchbeast.report.tensorboard import TensorBoard
from torchbeast.report.terminal import make_view
from torchbeast.runtime.disk import IgnoreWriteErrors

FIRST_LOG_S = 1.0


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
            self._tensorboard.close()
            self._writer.close(successful=error is None)

    def update(self) -> None:
        """Log if it is time. Before the first update of a run there is nothing to say."""
        if time.monotonic() >= self._due and self._stats.step > self._last_step:
            self._log()
        self._view.tick(self._stats.step)

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
