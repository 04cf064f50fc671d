"""`core.environment` as code written for TorchBeast uses it."""

import gymnasium
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
