"""Observations and actions of any space: agents act within it, and learn."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from libtorchbeast.groups import spec_of_group
from libtorchbeast.specs import ArraySpec
from libtorchbeast.sync_envs import SyncEnvs
from libtorchbeast.tree import leaves_of, map_tree
from tests.helpers import any_space, training
from tests.helpers.any_space import AnySpace
from torchbeast.core.losses import compute_loss
from torchbeast.envs import EnvOptions, look_at
from torchbeast.envs.spaces import observe
from torchbeast.errors import UsageError
from torchbeast.models.frames import Numbers
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.training import build_learner

VECTOR = spaces.Box(-1.0, 1.0, (3,))
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "start": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([2, 3, 4]),
    "multi_start": spaces.MultiDiscrete([2, 3], start=[5, -2]),
    "grid": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "bits": spaces.MultiBinary(4),
    "bit_grid": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-2.0, 2.0, (2,)),
    "lopsided": spaces.Box(np.array([0.0, -1.0], np.float32), np.array([0.1, 5.0], np.float32)),
    "double": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,)))),
    "dict": spaces.Dict({"b": spaces.MultiBinary(2), "a": spaces.Dict({"c": spaces.Discrete(4)})}),
}
OBSERVATIONS = {
    "scalar": spaces.Box(0.0, 1.0, ()),
    "number": spaces.Discrete(4, start=2),
    "million": spaces.Discrete(1_000_000, start=-5),
    "multi": spaces.MultiDiscrete([3, 5]),
    "large_multi": spaces.MultiDiscrete([5_000, 3, 2_000_000]),
    "bits": spaces.MultiBinary(6),
    "bit_grid": spaces.MultiBinary([2, 3]),
    "bools": spaces.Box(0, 1, (4,), np.bool_),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "shorts": spaces.Box(-300, 300, (2, 2), np.int16),
    "longs": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
    "unsigned": spaces.Box(0, 2**40, (2,), np.uint64),
    "half": spaces.Box(-1.0, 1.0, (2,), np.float16),
    "cube": spaces.Box(-1.0, 1.0, (2, 3, 4, 5)),
    "wide": spaces.Box(0, 60_000, (3,), np.uint16),
    "double": spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    "image": spaces.Box(0, 255, (64, 64, 3), np.uint8),
    "dict": spaces.Dict({"image": spaces.Box(0, 255, (40, 40, 1), np.uint8), "speed": VECTOR}),
    "nested": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": VECTOR, "y": VECTOR}))),
}


def play_and_learn(observation_space, action_space, **flags):
    """Rows of a short rollout with the agent's own actions, and the loss of one update."""
    envs = SyncEnvs(
        lambda: AnySpace(observation_space, action_space), 2, seed=0, observe=observe, rebuild=False
    )
    return learn_from(envs, **flags)


def learn_from(envs, **flags):
    """The same, of a group of two."""
    torch.manual_seed(0)
    flags = TrainingFlags(env="Catch", unroll_length=7, **flags)
    row = envs.reset()
    spec = spec_of_group(envs, row)
    learner = build_learner(flags, spec, torch.device("cpu"))
    rows, outputs, state = [row], [], learner.model.initial_state(batch_size=2)
    for _ in range(flags.unroll_length):
        inputs = map_tree(lambda x: torch.from_numpy(x).unsqueeze(0), rows[-1])
        with torch.no_grad():
            output, state = learner.model(inputs, state)
        outputs.append(output)
        # An environment that raises because of an action outside of its space ends the test here.
        rows.append(envs.step(map_tree(lambda x: x[0].numpy(), output["action"])))
    batch = map_tree(lambda *x: torch.from_numpy(np.stack(x)), *rows)
    for name in ("action", "policy_logits"):
        batch[name] = map_tree(lambda *x: torch.cat(x), *(o[name] for o in outputs))
    initial = learner.model.initial_state(batch_size=2)
    loss, _ = compute_loss(learner.model, batch, initial, flags, distribution=learner.distribution)
    log_rhos = _log_rhos(learner, batch, initial)
    torch.testing.assert_close(log_rhos, torch.zeros_like(log_rhos), rtol=0, atol=1e-4)
    before = [p.detach().clone() for p in learner.model.parameters()]
    learner.step(batch, initial)
    after = list(learner.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return rows, loss


def _log_rhos(learner, batch, initial):
    """The weights have not changed since: target and behaviour policy are the same."""
    output, _ = learner.model(batch, initial)
    logits = output["policy_logits"][:-1]
    target = learner.distribution.log_prob(logits, batch["action"])
    return target - learner.distribution.log_prob(batch["policy_logits"], batch["action"])


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("name", ACTIONS)
def test_agents_act_within_any_action_space_and_learn(name, use_lstm):
    rows, loss = play_and_learn(VECTOR, ACTIONS[name], use_lstm=use_lstm)
    assert loss.isfinite()
    for leaf, action in zip(
        leaves_of(rows[1]["last_action"]), leaves_of(rows[2]["last_action"]), strict=True
    ):
        assert leaf[1].shape == action[1].shape


def test_many_categories_take_little_memory_and_are_told_apart():
    numbers = Numbers(ArraySpec("int64", (), -5, 999_994, categories=True))
    assert numbers.num_outputs == 32
    assert sum(p.numel() for p in numbers.parameters()) == 2 * 1000 * 16
    x = torch.tensor([-5, -4, 995, 999_994])
    codes = numbers(x)
    assert len(codes.unique(dim=0)) == 4
    # What is out of bounds, from wherever it comes, ends no run.
    assert torch.equal(numbers(torch.tensor([-999, 10**12])), codes[[0, 3]])
    board = Numbers(ArraySpec("int64", (64, 64), 0, 39, categories=True))
    assert board.num_outputs == 64 * 64 * 32  # less than one-hot


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(VECTOR, None),
        spaces.OneOf((VECTOR, spaces.Discrete(2))),
    ],
)
def test_observations_without_arrays_of_one_shape_are_refused(space, monkeypatch):
    for nested in (space, spaces.Dict(x=VECTOR, y=space)):
        made = functools.partial(AnySpace, nested, spaces.Discrete(2))
        monkeypatch.setattr(any_space, "made", made, raising=False)
        kind = type(space).__name__
        with pytest.raises(UsageError, match=f"^--env .*: A {kind} space has no arrays of one"):
            look_at(EnvOptions("tests.helpers.any_space:made"))


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_there_is_a_model_for_any_observation_space(name):
    _, loss = play_and_learn(OBSERVATIONS[name], spaces.Discrete(3))
    assert loss.isfinite()


def test_squashed_actions_are_learnt_from():
    _, loss = play_and_learn(VECTOR, ACTIONS["box"], squash_actions=True)
    assert loss.isfinite()


def test_what_is_drawn_outside_of_a_box_is_clipped_for_the_environment_alone():
    envs = SyncEnvs(lambda: AnySpace(VECTOR, ACTIONS["box"]), 1, seed=0, rebuild=False)
    envs.reset()
    row = envs.step(np.array([[5.0, -0.5]], np.float32))  # raises unless it is clipped
    assert row["last_action"].tolist() == [[5.0, -0.5]]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("beast", ["monobeast", "polybeast"])
def test_a_choice_and_an_aim_are_learnt_together(beast, tmp_path):
    args = ("--env", "tests.helpers.any_space:Mixed", "--total_steps", "200000")
    # Of 10; at random about 2, and 5 at most for one of the two alone.
    training.learn(beast, tmp_path, 5.5, *args)
