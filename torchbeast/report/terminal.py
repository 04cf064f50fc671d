"""A run's progress: a live bar on a terminal, plain lines in files and pipes."""

import logging
import sys
import time
from collections import deque
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchbeast.core.ranks import Place
from torchbeast.report.figures import FIGURES, show

Figures = dict[str, float | int | None]

HEADLINE = ("mean_episode_return", "total_loss")
DETAILS = [name for name, figure in FIGURES.items() if figure.in_view]
DETAILS_PER_ROW = 4
STALL_S = 5.0  # without a step, until the live view reports it
STALL_LINE_S, STALL_LINE_AGAIN_S = 10.0, 60.0  # until a printed line reports it, and until the next
PACE_S, PACE_EACH_S = 60.0, 0.2  # the period over which speed is measured, and between two samples


class View(Protocol):
    def start(self) -> None: ...
    def tick(self, step: int) -> None: ...
    def show(self, figures: Figures) -> None: ...
    def stall(self, seconds: float, text: str) -> None:
        """Show for how long there was no step, and why; called often, also during progress."""

    def stop(self) -> None: ...


def make_view(total_steps: int) -> View:
    return LiveView(total_steps) if sys.stdout.isatty() else PlainView(total_steps)


def log_to_terminal(logger: logging.Logger | None = None) -> logging.Handler:
    """Show log messages of the program, or of one logger, above the live bar if there is one.

    With several learners, those other than the first show only warnings and errors. Returns the
    handler.
    """
    handler = _CurrentStderr()
    place = Place.find()
    who = "" if place.is_alone else f" learner {place.rank}"
    handler.setFormatter(logging.Formatter(f"[%(levelname)s{who} %(asctime)s] %(message)s"))
    if place.rank > 0:
        handler.setLevel(logging.WARNING)
    if logger is None:
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    else:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return handler


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr, which a live view replaces while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class PlainView:
    """Prints a line at each log interval."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._stall_line_s = STALL_LINE_S
        self._pace = Pace()

    def start(self) -> None:
        pass

    def tick(self, step: int) -> None:
        self._pace.see(step)

    def show(self, figures: Figures) -> None:
        parts = [
            f"step {show('step', figures['step'])} of {self._total_steps:,}",
            f"sps {show('sps', figures['sps'])}",
            f"left {self._pace.time_left(self._total_steps)}",
            *(f"{name} {show(name, figures.get(name))}" for name in HEADLINE),
        ]
        print(" | ".join(parts), flush=True)

    def stall(self, seconds: float, text: str) -> None:
        if seconds < STALL_LINE_S:
            self._stall_line_s = STALL_LINE_S
        elif seconds >= self._stall_line_s:
            self._stall_line_s = seconds + STALL_LINE_AGAIN_S
            print(f"No step for {seconds:.0f} s: {text}", flush=True)

    def stop(self) -> None:
        pass


class LiveView:
    """A progress bar, the most important figures, the others, and why there are no steps."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._figures: Figures = {}
        self._step = 0
        self._stalled_s, self._stall_text = 0.0, ""
        self._pace = Pace()
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("train", total=total_steps)
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self._render)

    def start(self) -> None:
        self._live.start()

    def tick(self, step: int) -> None:
        self._step = step
        self._pace.see(step)
        self._progress.update(self._task, completed=min(step, self._total_steps))

    def show(self, figures: Figures) -> None:
        self._figures = {**self._figures, **figures}  # some come only now and then

    def stall(self, seconds: float, text: str) -> None:
        self._stalled_s, self._stall_text = seconds, text

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        stalled = self._stalled_s >= STALL_S
        words = f"No step for {self._stalled_s:.0f} s: {self._stall_text}" if stalled else ""
        if not self._figures:
            return Group(self._progress, Text(words or "Starting ..."))
        # The current step, as in the bar, and not that of the last log.
        figures = {**self._figures, "step": self._step}
        if stalled:
            figures["sps"] = 0
        headline = Table.grid(padding=(0, 3))
        headline.add_row(
            f"step [bold]{show('step', self._step)}[/] of {self._total_steps:,}",
            f"sps [bold]{show('sps', figures['sps'])}[/]",
            f"left [bold]{self._pace.time_left(self._total_steps)}[/]",
            *(f"{name} [bold]{show(name, figures.get(name))}[/]" for name in HEADLINE),
        )
        details = Table.grid(padding=(0, 3))
        cells = [
            f"[dim]{name}[/] {show(name, figures[name])}"
            for name in DETAILS
            if name in figures and name not in ("step", "sps", *HEADLINE)
        ]
        for i in range(0, len(cells), DETAILS_PER_ROW):
            details.add_row(*cells[i : i + DETAILS_PER_ROW])
        warning = [Text(words, style="yellow")] if words else []
        return Group(self._progress, headline, details, *warning)


class Pace:
    """Measures the speed over the last minute: a single interval may have no update, or two."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, step: int) -> None:
        now = time.monotonic()
        if self._seen and now - self._seen[-1][0] < PACE_EACH_S:
            return
        self._seen.append((now, step))
        while now - self._seen[0][0] > PACE_S:
            self._seen.popleft()

    def time_left(self, total_steps: int) -> str:
        """The time that training still takes, as text; "?" if it is not known."""
        if not self._seen:
            return "?"
        (began_at, first), (now, step) = self._seen[0], self._seen[-1]
        if step == first:
            return "?"
        seconds = max(0.0, total_steps - step) * (now - began_at) / (step - first)
        if seconds >= 3600:
            return f"{seconds / 3600:.1f} h"
        return time.strftime("%M:%S", time.gmtime(seconds))
