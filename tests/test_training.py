"""The frame around training runs."""

import contextlib
import csv
import os
import resource
import time
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchbeast.core.file_writer import FileWriter
from torchbeast.core.learner import Learner
from torchbeast.core.stats import RunningStats
from torchbeast.errors import UsageError
from torchbeast.models import Agent
from torchbeast.report import Reporter
from torchbeast.report.tensorboard import TensorBoard
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.signals import StopRequest
from torchbeast.run.training import Run, only_run_in, run_training


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "new" / "run"
    with only_run_in(folder):
        with only_run_in(tmp_path / "other", timeout_s=0):
            pass
        with (
            pytest.raises(UsageError, match=r"Another run is at work in .*another --xpid"),
            only_run_in(folder, timeout_s=0.3),
        ):
            pass
    with only_run_in(folder, timeout_s=0):
        pass


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"Cannot write to .*file/run.*give another --savedir"),
        only_run_in(tmp_path / "file" / "run"),
    ):
        pass


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    caplog.set_level("INFO")
    flags = TrainingFlags(savedir=tmp_path, xpid="run", log_interval_s=0.0)
    writer, stats = FileWriter("run", {}, tmp_path), RunningStats()
    full = open("/dev/full", "w")  # noqa: SIM115
    with Reporter(writer, stats, flags.total_steps, flags.log_interval_s) as reporter:

        def log():
            stats.add_update(1, {})
            reporter.update()

        time.sleep(0.01)
        log()
        good, writer._file = writer._file, full
        log()
        log()
        assert caplog.text.count("but logs.csv cannot be written: [Errno 28] No space left") == 1
        writer._file = good
        log()
        assert "Writing logs.csv works again" in caplog.text
    with contextlib.suppress(OSError):
        full.close()
    with writer.paths["logs"].open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "4"]


def test_a_tensorboard_file_goes_on_whole_after_a_full_disk(tmp_path):
    board = TensorBoard(tmp_path, first_step=0)
    board.log({"step": 1, "total_loss": 0.5}, step=1)
    (path,) = tmp_path.iterdir()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, unlimited[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                board.log({"step": 2, "total_loss": 0.25}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    board.log({"step": 3, "total_loss": 0.125}, step=3)
    board.close()
    events = EventAccumulator(str(path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/total_loss")] == [
        (1, 0.5),
        (3, 0.125),
    ]


def test_a_last_checkpoint_that_cannot_be_written_is_one_sentence(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run")
    learner = Learner(Agent((4,), 2, False, "mlp"), flags, torch.device("cpu"))

    def fill_the_disk(run):
        (flags.rundir / f"model.tar.{os.getpid()}.tmp").symlink_to("/dev/full")

    assert run_training(flags, learner, fill_the_disk, StopRequest()) == 1
    assert (
        "The checkpoint of the last step, 0, cannot be written: [Errno 28] No space" in caplog.text
    )


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", checkpoint_interval_s=0.0)
    learner = Learner(Agent((4,), 2, False, "mlp"), flags, torch.device("cpu"))
    run = Run(flags, learner, StopRequest(), SimpleNamespace(update=lambda explain: None))
    run.tick()
    assert "the checkpoint cannot be written" in caplog.text
    assert learner.lock.acquire(timeout=0)
    learner.lock.release()
    flags.rundir.mkdir()
    run.tick()
    assert (flags.rundir / "model.tar").exists()


def test_a_checkpoint_is_not_forgotten_by_a_run_without(tmp_path):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", disable_checkpoint=True)
    flags.rundir.mkdir()
    (flags.rundir / "model.tar").write_text("")
    with pytest.raises(UsageError, match="has a checkpoint, which --disable_checkpoint"):
        run_nothing(flags)


def run_nothing(flags):
    learner = Learner(Agent((4,), 2, encoder="mlp"), flags, torch.device("cpu"))
    with StopRequest() as stop:
        return run_training(flags, learner, lambda run: None, stop)


def test_a_second_run_without_checkpoints_leaves_the_rows_of_the_first(tmp_path):
    writer = FileWriter("run", {}, tmp_path)
    writer.log({"step": 40})
    writer.close()
    run_nothing(TrainingFlags(savedir=tmp_path, xpid="run", disable_checkpoint=True))
    with (tmp_path / "run" / "logs.csv").open(newline="") as file:
        assert next(csv.DictReader(file))["step"] == "40"


def test_weights_that_are_not_there_leave_no_files_of_a_run(tmp_path):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", init_from="nobody")
    with pytest.raises(UsageError, match="--init_from nobody"):
        run_nothing(flags)
    assert [path.name for path in tmp_path.rglob("*")] in (["run", "lock"], ["lock", "run"])


def test_names_of_log_info_that_never_come_are_named_once(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", log_info="score, nobody")
    learner = Learner(Agent((4,), 2, False, "mlp"), flags, torch.device("cpu"))
    run = Run(flags, learner, StopRequest(), SimpleNamespace(update=lambda explain: None))
    learner.stats.add_info({"score": (1.0, 1)})
    run.tick()
    assert not caplog.text
    learner.stats.add_episodes([0.0] * 100, [1] * 100)
    run.tick()
    run.tick()
    assert caplog.text.count("--log_info names nobody, which no episode had so far") == 1
