"""Models of one's own in examples/: their memory is exact, and they learn what needs a memory."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from examples import gru_memory, nethack, transformer_memory
from libtorchbeast.rows import Spec
from libtorchbeast.specs import discrete, spec_of_space
from libtorchbeast.tree import map_tree
from tests.helpers import training
from torchbeast.run.model_check import random_rows, try_model

MODULES = {"gru": gru_memory, "transformer": transformer_memory}


@pytest.mark.parametrize("name", MODULES)
def test_whole_rollouts_and_single_rows_give_the_same(name):
    torch.manual_seed(0)
    model = MODULES[name].Agent((3,), num_actions=2, use_lstm=False).eval()
    T, B = 20, 3
    frame, done = torch.randn(T, B, 3), torch.rand(T, B) < 0.2
    whole, whole_state = model({"frame": frame, "done": done}, model.initial_state(B))
    state = model.initial_state(B)
    for t in range(T):
        row = {"frame": frame[t : t + 1], "done": done[t : t + 1]}
        output, state = model(row, state)
        torch.testing.assert_close(output["policy_logits"][0], whole["policy_logits"][t])
        torch.testing.assert_close(output["baseline"][0], whole["baseline"][t])
    torch.testing.assert_close(state[-1], whole_state[-1])


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_remembered_from_the_episode_before(name):
    torch.manual_seed(0)
    model = MODULES[name].Agent((3,), num_actions=2, use_lstm=False).eval()
    frame, done = torch.randn(6, 1, 3), torch.tensor([[0], [0], [0], [1], [0], [0]]).bool()
    other = frame.clone()
    other[:3] += 1.0  # another episode before the one that begins at row 3
    outputs = [
        model({"frame": f, "done": done}, model.initial_state(1))[0]["policy_logits"]
        for f in (frame, other)
    ]
    assert not torch.allclose(outputs[0][:3], outputs[1][:3])
    torch.testing.assert_close(outputs[0][3:], outputs[1][3:])


NETHACK = spaces.Dict(  # as nle has them
    chars=spaces.Box(0, 255, (21, 79), np.uint8),
    blstats=spaces.Box(-(2**31), 2**31 - 1, (27,), np.int64),
    message=spaces.Box(0, 255, (256,), np.uint8),
)


def test_the_net_for_nethack_can_be_trained(caplog):
    """By what every model is tried with before training; nle itself may be missing."""
    spec = Spec(spec_of_space(NETHACK), discrete(23))
    torch.manual_seed(0)
    model = nethack.Net(NETHACK, spaces.Discrete(23))
    try_model(model, spec, 23)
    assert not caplog.records  # its memory is exact, and ends with an episode
    rows = map_tree(torch.from_numpy, random_rows(spec, T=2, B=3))
    (first, _), (second, _) = (
        model({**rows, "frame": frame}, model.initial_state(3))
        for frame in (rows["frame"], {**rows["frame"], "chars": rows["frame"]["chars"] * 0})
    )
    assert not torch.allclose(first["baseline"], second["baseline"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODULES)
def test_what_needs_a_memory_is_learnt(name, tmp_path):
    model = f"examples.{name}_memory:Agent"
    args = ("--env", "Memory", "--model", model, "--total_steps", "150000")
    training.learn("polybeast", tmp_path, 0.9, *args)
