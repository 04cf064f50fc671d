"""The frame around training runs."""

import contextlib
import csv
import time
from types import SimpleNamespace

import pytest
import torch

from torchbeast.core.file_writer import FileWriter
from torchbeast.core.learner import Learner
from torchbeast.core.stats import RunningStats
from torchbeast.errors import UsageError
from torchbeast.models import Agent
from torchbeast.report import Reporter
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
        pytest.raises(UsageError, match=r"Nothing can be kept in .*file/run.*see --savedir"),
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


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", checkpoint_interval_s=0.0)
    learner = Learner(Agent((4,), 2, False, "mlp"), flags, torch.device("cpu"))
    run = Run(flags, learner, StopRequest(), SimpleNamespace(update=lambda: None))
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
        run_training(flags, None, None, StopRequest())
