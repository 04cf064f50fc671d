"""Progress on the terminal: a live bar for people, plain lines for files and pipes."""

import logging
import sys
import time
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Figures = dict[str, float | int | None]

DETAILS = (
    ("episodes", "episodes", "{:,.0f}"),
    ("mean_episode_step", "episode length", "{:,.0f}"),
    ("policy_lag", "policy lag", "{:.1f}"),
    ("clipped_rho_fraction", "clipped weights", "{:.1%}"),
    ("explained_variance", "explained variance", "{:.2f}"),
    ("grad_norm", "gradient norm", "{:.1f}"),
    ("entropy_loss", "entropy loss", "{:.2f}"),
    ("learning_rate", "learning rate", "{:.2e}"),
    # PolyBeast's alone.
    ("inference_batch_size", "inference batch", "{:.1f}"),
    ("inference_idle", "inference idle", "{:.0%}"),
    ("learner_idle", "learner idle", "{:.0%}"),
    ("learner_queue_size", "learner queue", "{:.1f}"),
)


class View(Protocol):
    def start(self) -> None: ...
    def tick(self, step: int) -> None: ...
    def show(self, figures: Figures) -> None: ...
    def stop(self) -> None: ...


def make_view(total_steps: int) -> View:
    return LiveView(total_steps) if sys.stdout.isatty() else PlainView(total_steps)


def log_to_terminal() -> None:
    """Show log messages, above the live bar if there is one."""
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter("[%(levelname)s %(asctime)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the time: a live view puts its own there while it runs."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class PlainView:
    """One line for each log."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def start(self) -> None:
        pass

    def tick(self, step: int) -> None:
        pass

    def show(self, figures: Figures) -> None:
        print(
            f"step {figures['step']:,} of {self._total_steps:,}"
            f" | {figures['sps']:,.0f} SPS"
            f" | left {time_left(figures, self._total_steps)}"
            f" | return {_format(figures.get('mean_episode_return'), '{:.2f}')}"
            f" | loss {_format(figures.get('total_loss'), '{:.2f}')}",
            flush=True,
        )

    def stop(self) -> None:
        pass


class LiveView:
    """A bar with steps, SPS, time left, mean return and loss, and a table of the rest."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._figures: Figures = {}
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("train", total=total_steps)
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self._render)

    def start(self) -> None:
        self._live.start()

    def tick(self, step: int) -> None:
        self._progress.update(self._task, completed=min(step, self._total_steps))

    def show(self, figures: Figures) -> None:
        self._figures = figures

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        figures = self._figures
        if not figures:
            return Group(self._progress, "Starting the actors ...")
        headline = Table.grid(padding=(0, 3))
        headline.add_row(
            f"steps [bold]{figures['step']:,}[/] of {self._total_steps:,}",
            f"SPS [bold]{figures['sps']:,.0f}[/]",
            f"left [bold]{time_left(figures, self._total_steps)}[/]",
            f"return [bold green]{_format(figures.get('mean_episode_return'), '{:.2f}')}[/]",
            f"loss [bold]{_format(figures.get('total_loss'), '{:.2f}')}[/]",
        )
        details = Table.grid(padding=(0, 3))
        cells = [
            f"[dim]{label}[/] {_format(figures[name], form)}"
            for name, label, form in DETAILS
            if name in figures
        ]
        for i in range(0, len(cells), 4):
            details.add_row(*cells[i : i + 4])
        return Group(self._progress, headline, details)


def time_left(figures: Figures, total_steps: int) -> str:
    """At the present speed."""
    sps, step = figures.get("sps"), figures.get("step") or 0
    if not sps:
        return "?"
    seconds = max(0.0, total_steps - step) / sps
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return time.strftime("%M:%S", time.gmtime(seconds))


def _format(value: float | int | None, form: str) -> str:
    return "-" if value is None else form.format(value)
