"""The frame around training runs."""

from types import SimpleNamespace

import pytest
import torch

from torchbeast.core.flags import TrainingFlags
from torchbeast.core.learner import Learner
from torchbeast.core.signals import StopRequest
from torchbeast.errors import UsageError
from torchbeast.models import Agent
from torchbeast.training import Run, only_run_in, run_training


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "new" / "run"
    with only_run_in(folder):
        with only_run_in(tmp_path / "other", patience_s=0):
            pass
        with (
            pytest.raises(UsageError, match=r"Another run is at work in .*another --xpid"),
            only_run_in(folder, patience_s=0.3),
        ):
            pass
    with only_run_in(folder, patience_s=0):
        pass


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"Nothing can be kept in .*file/run.*see --savedir"),
        only_run_in(tmp_path / "file" / "run"),
    ):
        pass


class FullDisk:
    """A reporter whose disk is full for a while."""

    num_calls = 0

    def update(self):
        self.num_calls += 1
        if self.num_calls < 4:
            raise OSError(28, "No space left on device")


def test_a_full_disk_ends_no_run(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", checkpoint_interval_s=1e9)
    reporter = FullDisk()
    run = Run(flags, learner=None, stop=StopRequest(), reporter=reporter)
    for _ in range(5):
        run.tick()
    assert reporter.num_calls == 5
    assert caplog.text.count("No space left on device") == 1


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path, caplog):
    flags = TrainingFlags(savedir=tmp_path, xpid="run", checkpoint_interval_s=0.0)
    learner = Learner(Agent((4,), 2, False, "mlp"), flags, torch.device("cpu"))
    run = Run(flags, learner, StopRequest(), SimpleNamespace(update=lambda: None))
    run.tick()
    assert "its files cannot be written" in caplog.text
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
