"""Checkpoints: always whole, plain types, and everything comes back."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from tests.test_learner import FLAGS, B, T, make_learner, random_batch
from torchbeast.core.learner import Learner
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


def test_a_save_that_fails_leaves_the_last_one_whole(tmp_path, monkeypatch):
    path = tmp_path / "model.tar"
    learner = make_learner()
    checkpoint.save(path, learner, FLAGS)
    before = path.read_bytes()

    def fail(contents, file):
        file.write(b"half of it")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, learner, FLAGS)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
    model = make_model("mlp", (8,), 4, use_lstm=False)
    with pytest.raises(UsageError, match=f"{path} was trained on Catch and does not fit Catch as"):
        checkpoint.resume(path, Learner(model, FLAGS, torch.device("cpu")), FLAGS)


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_damaged_checkpoint_is_told_with_the_place(tmp_path, length):
    path = tmp_path / "model.tar"
    checkpoint.save(path, make_learner(), FLAGS)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match=f"{path} cannot be read as a checkpoint"):
        checkpoint.resume(path, make_learner(), FLAGS)
