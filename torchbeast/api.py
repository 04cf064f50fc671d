"""`torchbeast.train` and `torchbeast.evaluate`: the command line's programs, called from Python.

Flags, validation, run folder and resume are those of the command line. Environments and models may
also be classes or functions that the calling program or notebook defines.
"""

import csv
import importlib
import importlib.util
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from libtorchbeast import secret
from torchbeast import user_code
from torchbeast.core.file_writer import new_xpid
from torchbeast.envs import REMOTE
from torchbeast.envs.options import names_of_code
from torchbeast.errors import UsageError
from torchbeast.report.terminal import log_to_terminal
from torchbeast.run.api_arguments import Wrappers, check_values, name_code
from torchbeast.run.checkpoint import keep_random_state
from torchbeast.run.command_line import complete
from torchbeast.run.evaluate import evaluate as play
from torchbeast.run.flags import TrainingFlags, with_values
from torchbeast.run.signals import StopRequest

Beast = Literal["poly", "mono"]


@dataclass(frozen=True)
class TrainedRun:
    """The result of `train`."""

    rundir: Path
    """The run's folder, an argument for `Agent.load`."""
    figures: dict[str, float]
    """The newest value of each figure in its logs.csv: step, mean_episode_return ..."""


def train(
    env: Any = None,
    model: Any = None,
    *,
    wrappers: Wrappers = (),
    beast: Beast | None = None,
    **flags: Any,
) -> TrainedRun:
    """Train an agent, as `python -m torchbeast.polybeast` does, and return when it is trained.

    Ctrl-C and SIGTERM write a checkpoint first; then they end the program as usual. If a run named
    `xpid` exists already, it is resumed.

    Args:
        env: a name, as on the command line, or a class or function that makes an environment.
        model: a name, or a class or function that makes a `torch.nn.Module`.
        wrappers: names, classes or functions; the first one is the innermost.
        beast: poly or mono; None: poly if the compiled modules are installed, else mono.
        flags: all other flags, by their names on the command line without the dashes.
    """
    given, objects = name_code(env, model, wrappers)
    if flags.get("mode", "train") != "train":
        raise UsageError(f"train() trains, got mode {flags['mode']!r}; torchbeast.evaluate plays.")
    module = _find_beast(beast, given)
    with user_code.offer(objects), _logging_to_terminal(), keep_random_state():
        xpid = flags.get("xpid") or new_xpid()
        settled: TrainingFlags = _settle(module.Flags, {**flags, **given, "xpid": xpid})
        user_code.pack(names_of_code(settled))  # UsageError if impossible, before anything starts
        stop = StopRequest()
        code = _run(module.train, settled, stop)
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt
        if code != 0:
            raise RuntimeError(f"The last checkpoint could not be written to {settled.rundir}.")
        if stop.signal is not None:
            raise SystemExit(0)  # SIGTERM ends the program
        return TrainedRun(settled.rundir, _last_figures(settled.rundir))


def evaluate(
    xpid: str | None = None,
    env: Any = None,
    model: Any = None,
    *,
    wrappers: Wrappers = (),
    render: bool = False,
    **flags: Any,
) -> list[float]:
    """Play episodes with the agent of run `xpid` (None: the latest run); returns their returns.

    With `render` a video is written to the run's folder. If the run was trained with classes or
    functions of your own, pass them again, as to `train`.
    """
    from torchbeast.monobeast import Flags

    given, objects = name_code(env, model, wrappers)
    mode = "test_render" if render else "test"
    with user_code.offer(objects), _logging_to_terminal(), keep_random_state():
        return play(_settle(Flags, {**flags, **given, "xpid": xpid, "mode": mode}))


def _settle(flags_class: Any, values: dict[str, Any]) -> Any:
    """The complete, validated flags of a run for which the caller has given `values`."""
    secret.take()
    values = check_values(flags_class, values)
    flags = complete(with_values(flags_class(), "command line", values), args=None)
    flags.validate()
    return flags


def _run(train: Any, flags: TrainingFlags, stop: StopRequest) -> int:
    try:
        return train(flags, stop)
    except SystemExit as stopped:  # stopped while waiting for environments
        return int(stopped.code or 0)


def _find_beast(beast: Beast | None, given: dict[str, str]) -> Any:
    names = {"poly": "polybeast", "mono": "monobeast"}
    if beast is None:
        beast = "poly" if importlib.util.find_spec("libtorchbeast._C") else "mono"
    if beast not in names:
        raise UsageError(f"beast must be poly or mono, got {beast!r}.")
    name = names[beast]
    if beast == "poly" and given.get("env") == REMOTE:
        name = "polybeast_learner"
    return importlib.import_module(f"torchbeast.{name}")


@contextmanager
def _logging_to_terminal() -> Iterator[None]:
    """Show log messages on the terminal, unless the program has set up logging itself."""
    logger = logging.getLogger("torchbeast")
    if logger.hasHandlers():
        yield
        return
    level = logger.level
    handler = log_to_terminal(logger)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _last_figures(rundir: Path) -> dict[str, float]:
    """The newest value of each figure in logs.csv, whose rows need not have all figures."""
    path = rundir / "logs.csv"
    figures: dict[str, float] = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                said = {name: float(value) for name, value in row.items() if value}
                figures.update(said)
    return {name: value for name, value in figures.items() if not name.startswith("_")}
