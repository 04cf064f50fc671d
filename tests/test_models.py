"""The models: shapes, memory, and that actors and learner compute the same."""

import pytest
import torch

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec
from tests.helpers.specs import spec_for
from torchbeast.errors import UsageError
from torchbeast.models import Agent, make_model

NUM_ACTIONS = 6


def random_inputs(T, B, frame_shape=(4, 84, 84), done_rate=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if len(frame_shape) == 3:
        frame = torch.randint(256, (T, B, *frame_shape), generator=generator, dtype=torch.uint8)
    else:
        frame = torch.randn(T, B, *frame_shape, generator=generator)
    return {
        "frame": frame,
        "reward": torch.randn(T, B, generator=generator),
        "done": torch.rand(T, B, generator=generator) < done_rate,
        "last_action": torch.randint(NUM_ACTIONS, (T, B), generator=generator),
    }


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize(
    ("name", "frame_shape"), [("shallow", (4, 84, 84)), ("deep", (4, 84, 84)), ("mlp", (7,))]
)
def test_models_give_logits_baseline_and_action(name, frame_shape, use_lstm):
    model = make_model(name, spec_for(frame_shape, NUM_ACTIONS), use_lstm)
    state = model.initial_state(batch_size=3)
    output, new_state = model(random_inputs(5, 3, frame_shape), state)
    assert output["policy_logits"].shape == (5, 3, NUM_ACTIONS)
    assert output["baseline"].shape == (5, 3)
    assert output["action"].shape == (5, 3)
    assert [s.shape for s in new_state] == [s.shape for s in state]
    assert len(state) == (2 if use_lstm else 0)


@pytest.mark.parametrize("done_rate", [0.0, 0.2, 1.0])
def test_unrolling_a_rollout_equals_stepping_through_it(done_rate):
    """What the learner computes for T rows is what the actor computed row by row."""
    T, B = 9, 4
    model = make_model("mlp", spec_for((7,), NUM_ACTIONS), use_lstm=True)
    inputs = random_inputs(T, B, (7,), done_rate)
    start = tuple(torch.randn_like(s) for s in model.initial_state(B))
    whole, end = model(inputs, start)
    state, rows = start, []
    for t in range(T):
        row, state = model({name: value[t : t + 1] for name, value in inputs.items()}, state)
        rows.append(row)
    for name in ("policy_logits", "baseline"):
        stepped = torch.cat([row[name] for row in rows])
        torch.testing.assert_close(whole[name], stepped, rtol=1e-5, atol=1e-6)
    for a, b in zip(end, state, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_memory_is_zeroed_exactly_at_episode_starts():
    """From a row with `done` on, nothing before it matters; in other columns everything does."""
    T, B, start = 8, 3, 4
    model = make_model("mlp", spec_for((7,), NUM_ACTIONS), use_lstm=True)
    inputs = random_inputs(T, B, (7,), done_rate=0.0)
    inputs["done"][start, 1] = True
    a, _ = model(inputs, model.initial_state(B))
    other = {name: value.clone() for name, value in inputs.items()}
    other["frame"][:start] += 1.0
    b, _ = model(other, tuple(torch.randn_like(s) for s in model.initial_state(B)))
    assert torch.equal(a["policy_logits"][start:, 1], b["policy_logits"][start:, 1])
    assert not torch.isclose(a["policy_logits"][start:, 0], b["policy_logits"][start:, 0]).any()
    assert not torch.isclose(a["policy_logits"][start - 1], b["policy_logits"][start - 1]).any()


def test_bad_memory_does_not_survive_an_episode_start():
    model = make_model("mlp", spec_for((7,), NUM_ACTIONS), use_lstm=True)
    inputs = random_inputs(1, 2, (7,), done_rate=1.0)
    state = tuple(torch.full_like(s, float("nan")) for s in model.initial_state(2))
    output, _ = model(inputs, state)
    assert output["policy_logits"].isfinite().all()


@pytest.mark.parametrize("name", ["shallow", "deep"])
def test_image_models_see_the_last_action_and_reward(name):
    model = make_model(name, spec_for((4, 84, 84), NUM_ACTIONS), use_lstm=False)
    inputs = {**random_inputs(1, 2), "reward": torch.zeros(1, 2)}
    before, _ = model(inputs)
    for field, value in (
        ("reward", torch.full((1, 2), 0.5)),
        ("last_action", (inputs["last_action"] + 1) % NUM_ACTIONS),
    ):
        output, _ = model({**inputs, field: value})
        assert not torch.allclose(output["policy_logits"], before["policy_logits"]), field


def test_an_even_background_leaves_no_trace():
    """Frames that differ in brightness only look the same to the convolutions."""
    model = make_model("shallow", spec_for((4, 84, 84), NUM_ACTIONS), use_lstm=False)
    inputs = random_inputs(1, 2)
    inputs["frame"] = inputs["frame"] // 2
    brighter = {**inputs, "frame": inputs["frame"] + 50}
    a, b = model(inputs)[0], model(brighter)[0]
    torch.testing.assert_close(a["policy_logits"], b["policy_logits"], rtol=1e-3, atol=1e-6)


def test_the_shallow_net_has_the_papers_size():
    model = Agent((4, 84, 84), NUM_ACTIONS)
    convs = 16 * (4 * 8 * 8 + 1) + 32 * (16 * 4 * 4 + 1)
    linear = 256 * (32 * 9 * 9 + 1)
    heads = (256 + 1 + NUM_ACTIONS + 1) * (NUM_ACTIONS + 1)
    assert sum(p.numel() for p in model.parameters()) == convs + linear + heads


def test_channels_may_come_last():
    first = make_model("shallow", spec_for((3, 84, 84), NUM_ACTIONS), use_lstm=False)
    last = make_model("shallow", spec_for((84, 84, 3), NUM_ACTIONS), use_lstm=False)
    last.load_state_dict(first.state_dict())
    inputs = random_inputs(2, 2, (3, 84, 84))
    a, _ = first(inputs)
    b, _ = last({**inputs, "frame": inputs["frame"].permute(0, 1, 3, 4, 2)})
    torch.testing.assert_close(a["policy_logits"], b["policy_logits"])


def test_actions_are_drawn_in_training_and_greedy_in_eval():
    torch.manual_seed(0)
    model = make_model("mlp", spec_for((7,), NUM_ACTIONS), use_lstm=False)
    one = random_inputs(1, 1, (7,))
    inputs = {name: value.expand(1, 4000, *value.shape[2:]) for name, value in one.items()}
    output, _ = model(inputs)
    counts = torch.bincount(output["action"].flatten(), minlength=NUM_ACTIONS) / 4000
    expected = output["policy_logits"][0, 0].softmax(0)
    torch.testing.assert_close(counts, expected, rtol=0, atol=0.04)
    model.eval()
    output, _ = model(inputs)
    assert (output["action"] == output["policy_logits"].argmax(-1)).all()


def test_wrong_models_get_one_sentence():
    with pytest.raises(UsageError, match="two or three dimensions"):
        make_model("deep", spec_for((7,), 2), False)
    with pytest.raises(UsageError, match="must say how many there are"):
        make_model("mlp", Spec(ArraySpec("float32", (7,))), False)
    with pytest.raises(UsageError, match="cannot be imported"):
        make_model("no.such:Model", spec_for((7,), 2), False)


def test_separate_nets_share_nothing_between_policy_and_baseline():
    agent = make_model("mlp", spec_for((5,), 3), use_lstm=False, separate_nets=True)
    row = {"frame": torch.randn(1, 9, 5), "done": torch.zeros(1, 9, dtype=torch.bool)}
    agent(row)[0]["baseline"].sum().backward()
    assert all(p.grad is None for p in [*agent.encoder.parameters(), agent.policy.weight])
    assert all(p.grad.any() for p in agent.baseline_encoder.parameters())


def test_deviations_of_float_actions_are_the_same_in_every_state():
    spec = Spec(ArraySpec("float32", (5,)), ArraySpec("float32", (2,), -1.0, 1.0))
    agent = make_model("mlp", spec, use_lstm=False, separate_nets=True)
    with torch.no_grad():
        agent.policy.weight.normal_()
        agent.policy.bias.normal_()
    row = {"frame": torch.randn(1, 9, 5), "done": torch.zeros(1, 9, dtype=torch.bool)}
    logits = agent(row)[0]["policy_logits"][0]
    assert logits[:, :2].std(dim=0).min() > 0
    torch.testing.assert_close(logits[:, 2:], agent.policy.bias[2:].expand(9, 2))
