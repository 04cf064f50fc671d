"""`core.environment` as code written for TorchBeast uses it."""

import gymnasium
import numpy as np
import pytest
import torch

from torchbeast.core.environment import Environment


def test_rows_are_tensors_with_time_and_batch():
    environment = Environment(gymnasium.make("CartPole-v1"))
    row = environment.initial()
    names = {"frame", "reward", "done", "episode_return", "episode_step", "last_action"}
    assert names <= set(row)
    assert row["frame"].shape == (1, 1, 4)
    assert row["done"].item() is True
    assert row["reward"].shape == (1, 1)

    steps = 0
    while True:
        steps += 1
        row = environment.step(torch.tensor([[1]]))
        assert row["last_action"].item() == 1
        if row["done"]:
            break
        assert row["episode_step"].item() == steps
    assert row["episode_return"].item() == steps  # of the episode that just ended
    assert environment.step(torch.tensor(0))["episode_step"].item() == 1
    environment.close()


class OldStyle:
    """As environments for TorchBeast were: no spaces, four values, its own memory for frames."""

    def __init__(self):
        self.frame = np.zeros(2)
        self.actions = []

    def reset(self):
        self.frame[:] = 0
        return self.frame

    def step(self, action):
        self.actions.append(action)
        if action == 7:
            raise RuntimeError("the dungeon collapsed")
        self.frame += 1
        return self.frame, float("nan") if action == 6 else 1.0, False, {}


def test_environments_written_for_torchbeast_get_plain_numbers():
    environment = Environment(OldStyle())
    environment.initial()
    environment.step(torch.tensor([[5]], dtype=torch.int32))
    environment.step(3)
    assert environment.gym_env.actions == [5, 3]
    assert all(type(action) is int for action in environment.gym_env.actions)
    environment.close()


def test_rows_stay_as_they_are_when_the_environment_goes_on():
    environment = Environment(OldStyle())
    first, second = environment.initial(), environment.step(0)
    environment.step(0)
    assert first["frame"].tolist() == [[[0, 0]]]
    assert second["frame"].tolist() == [[[1, 1]]]
    assert environment.initial()["episode_step"].item() == 0  # code for TorchBeast resets at will


def test_an_exception_of_the_environment_reaches_the_caller():
    environment = Environment(OldStyle())
    environment.initial()
    with pytest.raises(RuntimeError, match="the dungeon collapsed"):
        environment.step(7)
    assert environment.step(6)["reward"].isnan()  # nor is anything else kept from the caller
