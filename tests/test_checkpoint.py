"""Checkpoints: always whole, plain types, and everything comes back."""

import dataclasses
import os
import random

import numpy as np
import pytest
import torch

from tests.helpers.specs import spec_for
from tests.test_learner import FLAGS, B, T, make_learner, random_batch
from torchbeast.core.learner import Learner
from torchbeast.core.stats import EPISODE_WINDOW
from torchbeast.errors import UsageError
from torchbeast.models import make_model
from torchbeast.run import checkpoint


def test_resume_brings_everything_back(tmp_path):
    path = tmp_path / "model.tar"
    learner = make_learner()
    for seed in range(3):
        learner.step(random_batch(seed), ())
    learner.stats.count("dropped_rollouts", 5)
    checkpoint.save(path, learner, FLAGS)
    next_numbers = (torch.rand(1).item(), np.random.rand(), random.random())

    resumed = make_learner()
    assert checkpoint.resume(path, resumed, resumed.flags)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == next_numbers
    assert resumed.stats.state_dict() == learner.stats.state_dict()
    assert resumed.stats.step == 3 * T * B
    assert resumed.stats.summary()["dropped_rollouts"] == 5
    # From here on both learn alike: weights, optimizer and schedule are the same.
    for one in (learner, resumed):
        one.step(random_batch(9), ())
    for a, b in zip(learner.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert resumed.optimizer.param_groups[0]["lr"] == learner.optimizer.param_groups[0]["lr"] > 0


def test_updates_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    learner, locked = make_learner(), []
    write = checkpoint.write_whole

    def look_and_write(*args):
        locked.append(learner.lock.locked())
        write(*args)

    monkeypatch.setattr(checkpoint, "write_whole", look_and_write)
    checkpoint.save(tmp_path / "model.tar", learner, FLAGS)
    assert locked == [False]


def test_an_update_that_never_ends_spoils_no_checkpoint(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint, "UPDATE_S", 0.01)
    learner = make_learner()
    with learner.lock:
        checkpoint.save(tmp_path / "model.tar", learner, FLAGS)
    assert not list(tmp_path.iterdir())
    assert "The update in progress did not end; the checkpoint stays as it was." in caplog.text


def test_a_checkpoint_holds_plain_types_under_the_known_names(tmp_path):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    contents = torch.load(path, weights_only=True)
    assert {
        "model_state_dict",
        "optimizer_state_dict",
        "scheduler_state_dict",
        "stats",
        "flags",
    } <= set(contents)
    assert contents["flags"]["unroll_length"] == T


def test_a_full_disk_is_named_and_leaves_the_last_one_whole(tmp_path):
    path = tmp_path / "model.tar"
    learner = make_learner()
    checkpoint.save(path, learner, FLAGS)
    before = path.read_bytes()

    files = set(tmp_path.iterdir())
    (tmp_path / f"model.tar.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(path, learner, FLAGS)
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == files


def test_a_missing_checkpoint_is_told_with_the_place(tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path / "model.tar")):
        checkpoint.load(tmp_path / "model.tar")
    assert not checkpoint.resume(tmp_path / "model.tar", make_learner(), FLAGS)


def test_another_environment_is_refused(tmp_path):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    other = make_learner(dataclasses.replace(FLAGS, env="CartPole-v1"))
    with pytest.raises(UsageError, match="trained with --env Catch, got CartPole-v1"):
        checkpoint.resume(path, other, other.flags)


def test_a_checkpoint_without_totals_can_be_resumed(tmp_path):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    contents = torch.load(path, weights_only=True)
    del contents["stats"]["totals"]
    torch.save(contents, path)
    assert checkpoint.resume(path, make_learner(), FLAGS)


def test_a_model_of_other_shapes_is_told_with_the_place(tmp_path):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    model = make_model("mlp", spec_for((8,), 4), use_lstm=False)
    with pytest.raises(
        UsageError,
        match=f"{path} was trained on Catch and does not fit Catch as it is now, or with this",
    ):
        checkpoint.resume(path, Learner(model, FLAGS, torch.device("cpu")), FLAGS)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_damaged_checkpoint_is_told_with_the_place(tmp_path, length):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match=f"{path} cannot be read as a checkpoint"):
        checkpoint.resume(path, make_learner(), FLAGS)


def save_at(path, step, returns=(), flags=FLAGS):
    learner = make_learner(flags)
    learner.stats.step = step
    learner.stats.add_episodes(returns, [1] * len(returns))
    checkpoint.save(path, learner, flags)


def steps_in(folder):
    return {p.name: torch.load(p, weights_only=True)["stats"]["step"] for p in folder.iterdir()}


def test_the_last_few_are_kept(tmp_path):
    flags = dataclasses.replace(FLAGS, keep_checkpoints=2)
    for step in (10, 200, 30):
        save_at(tmp_path / "model.tar", step, flags=flags)
    assert steps_in(tmp_path) == {
        "model.tar": 30,
        "model-step-200.tar": 200,
        "model-step-30.tar": 30,
    }
    newest = (tmp_path / "model-step-30.tar").stat()
    assert (tmp_path / "model.tar").stat().st_ino == newest.st_ino  # takes no room of its own


def test_the_best_is_kept_if_it_is_no_luck(tmp_path):
    flags = dataclasses.replace(FLAGS, keep_checkpoints=1)
    few = EPISODE_WINDOW - 1
    for step, returns in enumerate([[9.0] * few, [1.0] * 100, [3.0] * 100, [2.0] * 100], start=1):
        save_at(tmp_path / "model.tar", step, returns, flags)
    assert steps_in(tmp_path) == {"model.tar": 4, "model-best.tar": 3}


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_unreadable_checkpoint_falls_back_to_the_one_before(tmp_path, caplog, damage):
    path = tmp_path / "model.tar"
    for step in (10, 20, 30):
        save_at(path, step)
    if damage == "cut":
        with path.open("r+b") as file:  # the newest has two names
            file.truncate(100)
    else:
        path.unlink()
        (tmp_path / "model-step-30.tar").unlink()
    learner = make_learner()
    assert checkpoint.resume(path, learner, FLAGS)
    assert learner.stats.step == 20
    what = {"cut": "cannot be read", "gone": "is missing"}[damage]
    assert f"{path} {what}; using model-step-20.tar instead, of step 20." in caplog.text


def test_only_the_newest_is_kept_if_one_is_asked_for(tmp_path):
    for step, number in ((10, 3), (20, 3), (30, 1)):
        flags = dataclasses.replace(FLAGS, keep_checkpoints=number)
        save_at(tmp_path / "model.tar", step, flags=flags)
    assert steps_in(tmp_path) == {"model.tar": 30}


def test_the_best_checkpoint_is_read_once_at_most(tmp_path, monkeypatch):
    reads = []
    load = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda path: reads.append(path) or load(path))
    for step, mean in enumerate([1.0, 3.0, 2.0, 4.0], start=1):
        save_at(tmp_path / "model.tar", step, [mean] * 100)
    assert reads == [tmp_path / "model-best.tar"]
    assert steps_in(tmp_path)["model-best.tar"] == 4


@pytest.mark.parametrize("name", ["squash_actions", "normalize_observations", "use_lstm"])
def test_another_policy_is_refused(tmp_path, name):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    flags = dataclasses.replace(FLAGS, **{name: True})
    with pytest.raises(UsageError, match=f"trained with --{name} False, got True"):
        checkpoint.resume(path, make_learner(), flags)
