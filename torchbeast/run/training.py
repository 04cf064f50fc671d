"""What every training run of both beasts does: make the learner, resume, report, save, stop."""

import fcntl
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from libtorchbeast.episode_info import MAX_NAMES
from libtorchbeast.rows import Spec
from libtorchbeast.seeding import derive_seed
from torchbeast.core.file_writer import FileWriter, MessageFile
from torchbeast.core.learner import Learner
from torchbeast.core.precision import computes_bf16
from torchbeast.core.rank_stats import SharedStats
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.stats import EPISODE_WINDOW, RunningStats
from torchbeast.envs import REMOTE, describe_lives
from torchbeast.errors import UsageError
from torchbeast.models import build_distribution, build_model
from torchbeast.report import Reporter, say_nothing
from torchbeast.run import checkpoint, saved_run
from torchbeast.run.eval_process import Evaluation
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.init_from import init_from
from torchbeast.run.model_check import try_model
from torchbeast.run.signals import StopRequest
from torchbeast.run.stall import Stall
from torchbeast.runtime.disk_errors import IgnoreWriteErrors
from torchbeast.runtime.process_setup import seed_everything

logger = logging.getLogger("torchbeast")

RETRY_S = 60.0  # pause after a checkpoint that could not be written
ENDING_S = 5.0  # time for the processes of a killed run to end


def build_learner(
    flags: TrainingFlags, spec: Spec, device: torch.device, ranks: Ranks = ALONE
) -> Learner:
    """A learner with a new model, which is tried once; UsageError if it does not fit `spec`."""
    distribution = build_distribution(flags, spec)
    model = build_model(flags, spec)
    try_model(model, spec, distribution.num_params)
    stats = RunningStats() if ranks.size == 1 else SharedStats()
    return Learner(model, flags, device, ranks=ranks, stats=stats, distribution=distribution)


class Run:
    """A run in progress, as its main loop sees it."""

    def __init__(
        self,
        flags: TrainingFlags,
        learner: Learner,
        stop: StopRequest,
        reporter: Reporter | None,
        spec: Spec | None = None,
    ) -> None:
        """`reporter` is None on ranks other than 0, which neither report nor save."""
        self._flags = flags
        self._learner = learner
        self._stop = stop
        self._reporter = reporter
        self._spec = spec
        self._path = flags.rundir / checkpoint.FILE_NAME
        self._save_at = time.monotonic() + flags.checkpoint_interval_s
        self._write_errors = IgnoreWriteErrors("the checkpoint")
        self._looks_for_info = bool(flags.info_names)

    @property
    def stop_requested(self) -> bool:
        """Whether to stop now; several learners stop together, in a round (core/rank_rounds.py)."""
        return self._stop.signal is not None and self._learner.rounds.stops_alone

    def tick(self, stall: Stall | None = None) -> None:
        """Report and save if it is time. Call it a few times a second.

        `stall` explains what the run waits for while there are no steps.
        """
        if self._reporter is None:
            return
        if stall is not None:
            stall.poll()
        self._reporter.update(say_nothing if stall is None else stall.explain)
        self._look_for_info()
        if time.monotonic() >= self._save_at and not self._flags.disable_checkpoint:
            with self._write_errors:
                checkpoint.save(self._path, self._learner, self._flags, self._spec)
            pause_s = self._flags.checkpoint_interval_s
            failed = self._write_errors.is_failing
            self._save_at = time.monotonic() + (min(pause_s, RETRY_S) if failed else pause_s)

    def _look_for_info(self) -> None:
        """Warn once about names in --log_info that no environment has sent."""
        stats = self._learner.stats
        if not self._looks_for_info or stats.episodes < EPISODE_WINDOW:
            return
        self._looks_for_info = False
        if missing := [n for n in self._flags.info_names if n not in stats.info_names]:
            logger.warning(
                "--log_info names %s, which no episode had so far in its last `info`; of each "
                "environment the first %d names with numbers are taken.",
                ", ".join(missing), MAX_NAMES,
            )  # fmt: skip


def _open_files(flags: TrainingFlags, resumed_at: int | None) -> FileWriter:
    try:
        writer = FileWriter(flags.xpid, flags.as_plain_dict(), flags.savedir)
        if resumed_at is not None:
            writer.resume_at(resumed_at)
    except OSError as error:
        raise cannot_write(flags.rundir, error) from error
    return writer


def cannot_write(folder: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write to {folder}: {error}; give another --savedir.")


def _introduce(flags: TrainingFlags, learner: Learner, saved: dict[str, Any] | None) -> None:
    """Print what the run does, and with which settings."""
    step = learner.stats.step
    what = "Training on" if saved is None else f"Resuming at step {step:,} of"
    print(f"{what} {flags.env}; everything is kept in {flags.rundir}")
    for line in saved_run.describe_sources(flags):
        print(line)
    if flags.env != REMOTE and (lives := describe_lives(flags.env_options)):
        print(lives)
    if flags.autocast == "auto":
        dtype = "bfloat16" if computes_bf16(learner.device.type) else "float32"
        print(f"The learner's image nets run in {dtype}, which is faster there (--autocast).")
    if saved is not None:
        for line in saved_run.describe_changes(saved, flags):
            print(line)
        rate = learner.optimizer.param_groups[0]["lr"]
        print(
            f"The learning rate goes on at {rate:.3g}, at step {step:,} of {flags.total_steps:,}."
        )


@contextmanager
def only_run_in(folder: Path, timeout_s: float = ENDING_S) -> Iterator[None]:
    """Lock a run's folder while entered; UsageError if another run holds it for `timeout_s`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise cannot_write(folder, error) from error
    deadline = time.monotonic() + timeout_s
    with lock as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"Another run is at work in {folder}; end it, or give this one another "
                        "--xpid."
                    ) from None
            except OSError:
                break  # a file system without locks
            time.sleep(0.1)
        yield


def run_training(
    flags: TrainingFlags,
    learner: Learner,
    loop: Callable[[Run], None],
    stop: StopRequest,
    spec: Spec | None = None,
) -> int:
    """Resume from a checkpoint if there is one, call `loop`, save. Returns the exit code.

    `spec` describes the environments, and is kept in checkpoints. The caller has entered `stop`, so
    that signals are noted during its set-up and clean-up, too.
    """
    assert flags.xpid is not None
    learner.rounds.stop = stop
    if learner.ranks.rank > 0:
        return _follow(flags, learner, loop, stop, spec)
    with only_run_in(flags.rundir):
        path = flags.rundir / checkpoint.FILE_NAME
        if flags.disable_checkpoint and checkpoint.find(path):
            raise UsageError(
                f"{flags.rundir} has a checkpoint, which --disable_checkpoint would ignore; leave "
                "the flag out to resume, or give another --xpid."
            )
        saved = None if flags.disable_checkpoint else checkpoint.resume(path, learner, flags)
        if learner.stats.step >= flags.total_steps:
            print(
                f"{flags.rundir} is trained for {flags.total_steps:,} steps; raise --total_steps."
            )
            learner.ranks.share(None)
            return 0
        weights = _take_weights(flags, learner, saved)
        learner.ranks.share(learner.state_dict())
        writer = _open_files(flags, None if saved is None else learner.stats.step)
        _introduce(flags, learner, saved)
        if weights:
            print(weights)

        reporter = Reporter(writer, learner.stats, flags.total_steps, flags.log_interval_s)
        with reporter, Evaluation(flags, learner):
            try:
                loop(Run(flags, learner, stop, reporter, spec))
            finally:
                saved_last = flags.disable_checkpoint or _save_last(flags, learner, spec)
        if stop.signal is not None:
            print(f"Stopped by {signal.Signals(stop.signal).name} at step {learner.stats.step:,}.")
        return stop.exit_code if saved_last else 1


def _follow(
    flags: TrainingFlags,
    learner: Learner,
    loop: Callable[[Run], None],
    stop: StopRequest,
    spec: Spec | None,
) -> int:
    """`run_training` for ranks other than 0, which start from the state of rank 0."""
    state = learner.ranks.share(None)
    if state is None:  # training is finished already
        return 0
    learner.load_state_dict(state)
    seed_everything(derive_seed(flags.seed, learner.version))  # a resume draws other numbers
    with _messages_in(flags.rundir):
        loop(Run(flags, learner, stop, None, spec))
    return stop.exit_code


@contextmanager
def _messages_in(folder: Path) -> Iterator[None]:
    """While entered, append log messages to <folder>/out.log."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = MessageFile(folder / "out.log")
    except OSError as error:
        raise cannot_write(folder, error) from error
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


def _take_weights(flags: TrainingFlags, learner: Learner, saved: dict[str, Any] | None) -> str:
    """Load the weights that --init_from names into a new run; returns what to print about it."""
    if flags.init_from is None:
        return ""
    if saved is not None:
        return "This run has weights of its own by now: --init_from is not read again."
    return init_from(flags.init_from, flags.savedir, learner.model)


def _save_last(flags: TrainingFlags, learner: Learner, spec: Spec | None) -> bool:
    """Write the last checkpoint; returns whether it could be written."""
    try:
        checkpoint.save(flags.rundir / checkpoint.FILE_NAME, learner, flags, spec)
    except OSError as error:
        logger.error(
            "The checkpoint of the last step, %d, cannot be written: %s; the one before stays.",
            learner.stats.step, error,
        )  # fmt: skip
        return False
    return True
