"""A model is tried before training; each mistake in it is one sentence."""

import logging

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from libtorchbeast.action_masks import with_mask
from libtorchbeast.rows import ArraySpec, Spec
from libtorchbeast.specs import spec_of_space
from libtorchbeast.tree import map_tree
from torchbeast.errors import UsageError
from torchbeast.models import Agent
from torchbeast.run.model_check import draw, random_rows, try_model

SPEC = Spec(ArraySpec("float32", (4,)))


class Model(nn.Module):
    """A right one with a memory; tests break it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)

    def initial_state(self, batch_size):
        return (torch.zeros(1, batch_size, 2),)

    def forward(self, inputs, state):
        (total,) = state
        rows = []
        for frame, done in zip(inputs["frame"], inputs["done"], strict=True):
            total = self.reset(total, done) + self.dropout(self.linear(frame))
            rows.append(total)
        logits = torch.cat(rows)
        output = {"policy_logits": logits, "baseline": logits[..., 0], "action": logits.argmax(-1)}
        return self.answer(output, (total,))

    def reset(self, total, done):
        return total.masked_fill(done.view(1, -1, 1), 0.0)

    def answer(self, output, state):
        return output, state


def broken(**methods):
    return type("Broken", (Model,), methods)()


def answering(change):
    """A model whose output and state are changed before they are returned."""

    def answer(self, output, state):
        return change(output, state)

    return broken(answer=answer)


def with_output(**changes):
    return answering(lambda output, state: ({**output, **changes}, state))


@pytest.mark.parametrize("use_lstm", [False, True])
def test_the_built_in_models_pass(use_lstm, caplog):
    try_model(Agent((4,), 2, use_lstm, "mlp"), SPEC, 2)
    assert not caplog.records


def test_a_right_model_passes_and_stays_as_it_was(caplog):
    model = Model()
    before = torch.get_rng_state()
    try_model(model, SPEC, 2)
    assert not caplog.records
    assert model.dropout.training
    assert torch.equal(torch.get_rng_state(), before)


def raise_in_forward(self, inputs, state):
    return inputs["picture"], state


MISTAKES = {
    "`baseline` must be [T, B] = [2, 3], got [2, 3, 1]": answering(
        lambda output, state: ({**output, "baseline": output["baseline"][..., None]}, state)
    ),
    "`policy_logits` must be [T, B, 2] = [2, 3, 2], got [2, 3, 1]": answering(
        lambda output, state: ({**output, "policy_logits": output["policy_logits"][..., :1]}, state)
    ),
    "`action` must be [T, B] = [2, 3], got [3]": answering(
        lambda output, state: ({**output, "action": output["action"][0]}, state)
    ),
    "`action` must be a tensor, got int": with_output(action=1),
    "`baseline` must be finite": answering(
        lambda output, state: ({**output, "baseline": output["baseline"] / 0}, state)
    ),
    "must have `baseline`": answering(
        lambda output, state: ({k: v for k, v in output.items() if k != "baseline"}, state)
    ),
    "must return (output, state), got a dict with": answering(lambda output, state: output),
    "must be a dict with `action`, `policy_logits` and `baseline`": answering(
        lambda output, state: (output["baseline"], state)
    ),
    "must return a state of 1 tensors as `initial_state` does, got a tuple of 0": answering(
        lambda output, state: (output, ())
    ),
    "state must stay float32[1, 3, 2], got float32[2, 3, 2]": answering(
        lambda output, state: (output, (torch.cat([*state, *state]),))
    ),
    "state must stay float32[1, 3, 2], got float64[1, 3, 2]": answering(
        lambda output, state: (output, (state[0].double(),))
    ),
    "`initial_state(batch_size=3)` must be [L, B, ...] with B = 3, got [3, 2]": broken(
        initial_state=lambda self, batch_size: (torch.zeros(batch_size, 2),)
    ),
    "`initial_state` must return a tuple of tensors, got NoneType": broken(
        initial_state=lambda self, batch_size: None
    ),
    "`forward` fails with KeyError: 'picture'": broken(forward=raise_in_forward),
    "`losses` must be a dict by name, got a tensor [2, 3]": with_output(losses=torch.zeros(2, 3)),
    "`losses` must be a dict by name, got a list of 1": with_output(losses=[torch.zeros(())]),
    "loss 'own' must be a tensor with one float, or with one for each row, [T, B] = [2, 3], got "
    "float32[3, 2]": with_output(losses={"own": torch.zeros(3, 2)}),
    "[T, B] = [2, 3], got float32[2, 3, 1]": with_output(losses={"own": torch.zeros(2, 3, 1)}),
    "[T, B] = [2, 3], got float.": with_output(losses={"own": 0.5}),
    "[T, B] = [2, 3], got int64[]": with_output(losses={"own": torch.tensor(1)}),
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_one_sentence(sentence):
    with pytest.raises(UsageError) as caught:
        try_model(MISTAKES[sentence], SPEC, 2)
    text = str(caught.value)
    assert sentence in text
    assert "\n" not in text


def test_the_sentence_says_where_a_model_fails():
    with pytest.raises(UsageError, match=r"test_model_check.py:\d+: return inputs\[.picture.\]"):
        try_model(broken(forward=raise_in_forward), SPEC, 2)


def test_memory_across_episodes_is_logged(caplog):
    caplog.set_level(logging.WARNING)
    try_model(broken(reset=lambda self, total, done: total), SPEC, 2)
    assert "remembers across the end of an episode" in caplog.text


def test_answers_that_depend_on_how_rows_are_cut_are_logged(caplog):
    def forward(self, inputs, state):  # takes the memory at row 0 for all rows
        logits = self.linear(inputs["frame"]) + state[0]
        output = {"policy_logits": logits, "baseline": logits[..., 0], "action": logits.argmax(-1)}
        return output, (logits[-1:],)

    try_model(broken(forward=forward), SPEC, 2)
    assert "output for two rows at once differs" in caplog.text


def test_a_model_without_initial_state_is_one_sentence():
    with pytest.raises(UsageError, match=r"must have a method `initial_state.*got Linear without"):
        try_model(nn.Linear(4, 2), SPEC, 2)


@pytest.mark.parametrize("shape", [(), ("T", 3), ("T - 1", 3)])
def test_losses_are_numbers_or_one_for_each_row(shape, caplog):
    def answer(output, state):
        T = len(output["baseline"])
        sizes = [{"T": T, "T - 1": T - 1}.get(size, size) for size in shape]
        return {**output, "losses": {"own": torch.zeros(sizes)}}, state

    try_model(answering(answer), SPEC, 2)
    assert not caplog.records


def test_losses_that_only_the_learner_sees_are_tried():
    def answer(output, state):
        losses = {"own": torch.zeros(7)} if torch.is_grad_enabled() else {}
        return {**output, "losses": losses}, state

    with pytest.raises(UsageError, match=r"loss 'own' must be .* got float32\[7\]"):
        try_model(answering(answer), SPEC, 2)


class Embeds(nn.Module):
    """A right model for numbers from 5 to 7."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, state):
        logits = self.embed(inputs["frame"] - 5)
        output = {"policy_logits": logits, "baseline": logits[..., 0], "action": logits.argmax(-1)}
        return output, state


def test_a_model_is_tried_with_numbers_of_the_space():
    observation = spec_of_space(spaces.Discrete(3, start=5))
    try_model(Embeds(), Spec(observation), 2)
    wider = spec_of_space(spaces.Discrete(40, start=5))
    with pytest.raises(UsageError, match="`forward` fails with IndexError"):
        try_model(Embeds(), Spec(wider), 2)


def test_a_loss_with_the_name_of_a_figure_is_refused():
    with pytest.raises(UsageError, match="another name than 'step', which is a figure"):
        try_model(with_output(losses={"step": torch.tensor(0.0)}), SPEC, 2)


# --- Its rows could have come from its environments ---------------------------------------------


T, B = 20, 10
SPACES = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([2, -np.inf, -np.inf]), np.array([np.inf, -3, np.inf]), dtype=np.float32),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(100, 200, (2,), np.int16),
    spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 30], start=[1, -7]),
    spaces.MultiBinary(4),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(0, 1, (), np.float64)])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_rows_are_within_the_space(space):
    rows = random_rows(Spec(spec_of_space(space)), T, B)
    for t in range(T):
        for b in range(B):
            observation = map_tree(lambda x, i=(t, b): x[i], rows["frame"])
            if isinstance(space, spaces.Discrete):
                observation = int(observation)
            assert space.contains(observation), observation


def test_all_numbers_of_small_spaces_are_drawn():
    rows = random_rows(Spec(spec_of_space(spaces.Discrete(3, start=5))), T, B)
    assert set(rows["frame"].ravel()) == {5, 6, 7}


def test_bounds_that_say_nothing_are_no_bounds():
    """Nets of one's own need not stand 1e38, which is what CartPole declares."""
    frame = draw(ArraySpec("float32", (4,), -3e38, 3e38), (T,), np.random.default_rng(0))
    assert (np.abs(frame) <= 1).all()
    assert len(np.unique(frame)) > 1


def test_integers_of_unknown_range_are_zero_and_bytes_are_bytes():
    generator = np.random.default_rng(0)
    assert not draw(ArraySpec("int64", (4,)), (T,), generator).any()
    assert draw(ArraySpec("uint8", (4,)), (T,), generator).max() > 128


@pytest.mark.parametrize("mask", [ArraySpec("bool", (3,)), ArraySpec("int8", (3,), 0, 1, True)])
def test_every_action_is_possible(mask):
    rows = random_rows(Spec(with_mask(ArraySpec("float32", (2,)), mask)), T, B)
    assert rows["frame"]["action_mask"].all()
