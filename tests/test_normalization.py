"""Observations and rewards that are normalised: each formula beside a slow one."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from tests.helpers.batches import make_batch
from tests.helpers.specs import spec_for
from torchbeast.core import losses
from torchbeast.core.learner import Learner
from torchbeast.core.losses import compute_loss
from torchbeast.core.reward_scale import RewardScale
from torchbeast.core.running_moments import RunningMoments
from torchbeast.models import make_model
from torchbeast.models.normalization import NormalizedObservations
from torchbeast.run.flags import TrainingFlags
from torchbeast.runtime.inference_model import ActorModel
from torchbeast.runtime.shared_weights import SharedWeights

T, B, A = 5, 4, 3
GAMMA = 0.9
FLAGS = TrainingFlags(
    env="Catch",
    total_steps=100_000,
    unroll_length=T,
    batch_size=B,
    discounting=GAMMA,
    reward_clipping="none",
    normalize_observations=True,
    normalize_rewards=True,
)
OBSERVATION = {
    "wide": ArraySpec("float32", (3,)),
    "place": ArraySpec("float64"),
    "image": ArraySpec("uint8", (2, 2)),
}


def make_frame(num_rows, generator):
    return {
        "wide": 100 + 7 * torch.randn(num_rows, B, 3, generator=generator),
        "place": torch.randn(num_rows, B, generator=generator, dtype=torch.float64) - 5,
        "image": torch.randint(256, (num_rows, B, 2, 2), dtype=torch.uint8, generator=generator),
    }


def random_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.arange(B).expand(T + 1, B)
    return make_batch(generator, T, B, A, make_frame, reward_size=30.0, source=source)


class Joined(nn.Module):
    """An agent for frames that are a dict; keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.agent = make_model("mlp", spec_for((4,), A), use_lstm=False)

    def initial_state(self, batch_size=1):
        return ()

    def forward(self, inputs, core_state=()):
        self.seen = inputs["frame"]
        parts = [inputs["frame"]["wide"], inputs["frame"]["place"].unsqueeze(-1)]
        return self.agent({**inputs, "frame": torch.cat(parts, -1)}, core_state)


def make_learner(flags=FLAGS):
    torch.manual_seed(0)
    model = NormalizedObservations(Joined(), OBSERVATION)
    return Learner(model, flags, torch.device("cpu"))


# --- Observations -----------------------------------------------------------------------------


def test_running_moments_are_those_of_all_samples_at_once():
    generator = np.random.default_rng(0)
    samples = 1e4 + generator.normal(size=(1000, 2)) * (1.0, 1e-3)
    moments = RunningMoments((2,))
    for part in np.split(samples, (1, 1, 20, 700)):  # one of them is empty
        moments.add(torch.from_numpy(part))
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-6)
    assert moments.count == 1000


def test_an_agent_sees_floats_normalised_and_integers_as_they_are():
    learner = make_learner()
    batch = random_batch()
    batch["truncated"][3, 1] = batch["done"][3, 1] = True  # nothing is learnt from row 2 there
    learner.step(copy.deepcopy(batch), ())
    rows = [(t, b) for t in range(T) for b in range(B) if not batch["truncated"][t + 1, b]]
    for name in ("wide", "place"):
        kept = np.array([batch["frame"][name][row].numpy() for row in rows], np.float64)
        expected = (batch["frame"][name].numpy() - kept.mean(0)) / kept.std(0)
        seen = learner.model.agent.seen[name]
        assert seen.dtype == torch.float32
        np.testing.assert_allclose(seen, expected.clip(-10, 10), rtol=1e-4, atol=1e-4)
    assert torch.equal(learner.model.agent.seen["image"], batch["frame"]["image"])


def test_actors_of_both_beasts_see_frames_as_the_learner_of_that_version():
    learner = make_learner()
    inference = ActorModel(learner.model, torch.device("cpu"))
    shared = SharedWeights(learner.model)
    actor = copy.deepcopy(learner.model)
    for i in range(3):
        learner.step(random_batch(i), ())
    inference.publish(learner.model, learner.version)
    shared.publish(learner.model, learner.version)
    shared.fetch(actor)
    batch = random_batch(7)
    expected, _ = learner.model(batch)
    with inference.newest() as (model, version):
        assert version == 3
        for each in (model, actor):
            output, _ = each(batch)
            torch.testing.assert_close(output["policy_logits"], expected["policy_logits"])
    fresh, _ = make_learner().model(batch)
    assert not torch.allclose(fresh["policy_logits"], expected["policy_logits"])


def test_statistics_go_on_after_a_resume():
    learner, resumed = make_learner(), make_learner()
    learner.step(random_batch(0), ())
    resumed.load_state_dict(copy.deepcopy(learner.state_dict()))
    batch = random_batch(1)
    batch["done"][0] = True  # as after a restart of the environments
    for each in (learner, resumed):
        each.step(copy.deepcopy(batch), ())
    for name, value in learner.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    ours, theirs = (each.state_dict()["reward_scale"] for each in (learner, resumed))
    assert ours["moments.count"] == 2 * T * B
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_not_learnt_from_is_in_no_statistic():
    learner, clean = make_learner(), make_learner()
    for i in range(2):
        batch = random_batch(i)
        clean.step(copy.deepcopy(batch), ())
        learner.step(batch, ())
        bad = random_batch(10 + i)
        bad["reward"][2] = float("nan")
        learner.step(bad, ())
    assert learner.stats.summary()["skipped_updates"] == 2
    for ours, theirs in (
        (learner.model.state_dict(), clean.model.state_dict()),
        (learner.state_dict()["reward_scale"], clean.state_dict()["reward_scale"]),
    ):
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name


def test_bytes_have_no_statistics_and_masks_stay_as_they_are():
    """A mask of floats, too: actions that are forbidden stay so whatever was forbidden before."""
    observation = {
        "action_mask": ArraySpec("float32", (A,), 0, 1),
        "image": ArraySpec("uint8", (40, 40)),
        "place": ArraySpec("float32", (2,)),
    }
    model = make_model("auto", Spec(observation, discrete(A)), False, normalize_observations=True)
    assert [tuple(moments.mean.shape) for moments in model.moments] == [(2,)]
    frame = {
        "action_mask": torch.tensor([0.0, 1.0, 1.0]).expand(T + 1, B, A),
        "image": torch.zeros(T + 1, B, 40, 40, dtype=torch.uint8),
        "place": torch.randn(T + 1, B, 2),
    }
    model.observe_frames(frame, torch.ones(T, B, dtype=torch.bool))
    output, _ = model({**random_batch(), "frame": frame})
    probabilities = output["policy_logits"].softmax(-1)
    assert (probabilities[..., 0] == 0).all()
    assert (probabilities[..., 1:] > 0.1).all()


# --- Numbers that are far too large -----------------------------------------------------------


def slow_moments(parts):
    """One number after the other; those out of reach count as the last that is within it."""
    kept, num_outliers = np.zeros(0), 0
    for part in parts:
        if len(kept) >= 100:
            mean, reach = kept.mean(), 30 * max(1.0, np.sqrt(kept.var() + 1e-8))
            num_outliers += int((np.abs(part - mean) > reach).sum())
            part = part.clip(mean - reach, mean + reach)
        kept = np.concatenate([kept, part])
    return kept.mean(), kept.var(), num_outliers


def test_numbers_that_are_far_away_count_as_the_farthest_within_reach():
    generator = np.random.default_rng(0)
    parts = [5 + 3 * generator.normal(size=size) for size in (60, 60, 500, 30)]
    parts[2][7], parts[3][9] = 1e30, -2000
    moments = RunningMoments()
    num_outliers = sum(moments.add(torch.from_numpy(part)) for part in parts)
    mean, variance, expected = slow_moments(parts)
    assert num_outliers == expected == 2
    assert moments.mean.item() == pytest.approx(mean)
    assert moments.variance.item() == pytest.approx(variance)


def test_statistics_follow_numbers_that_have_become_larger_for_good():
    moments = RunningMoments()
    moments.add(torch.zeros(10_000))
    for _ in range(100):
        moments.add(1e9 * torch.randn(160, generator=torch.Generator().manual_seed(0)))
    assert 1e8 < moments.deviation < 1e9


def test_one_huge_number_does_not_end_learning(caplog):
    learner, clean = make_learner(), make_learner()
    for i in range(50):
        for each in (learner, clean):
            batch = random_batch(i)
            if each is learner and i == 10:
                batch["reward"][2, 0] = batch["frame"]["wide"][2, 0, 0] = 1e30
            each.step(batch, ())
    assert learner.stats.summary()["outliers"] == 2
    assert "more than 30 deviations from their mean" in caplog.text
    for find in (lambda x: x._reward_scale.moments, lambda x: x.model.moments[1]):
        ratio = find(learner).deviation / find(clean).deviation
        assert (ratio < 10).all(), ratio


def test_nonfinite_rollouts_are_searched_with_the_rewards_of_the_update():
    """A reward that is only large is none: what is learnt from is scaled."""
    learner = make_learner()
    for i in range(10):
        learner.step(random_batch(i), ())
    bad = random_batch(20)
    bad["reward"][2, 0] = 1e25  # its square is not finite
    bad["reward"][2, 1] = float("nan")
    learner.step(bad, ())
    summary = learner.stats.summary()
    assert summary["nonfinite_rollouts"] == 1
    assert "skipped_updates" not in summary


# --- Rewards ----------------------------------------------------------------------------------


def cut_into_rollouts(seed, num_rollouts):
    """Streams of B environments, as batches whose last row is the first of the next."""
    generator = np.random.default_rng(seed)
    num_rows = num_rollouts * T + 1
    reward = 2 + 3 * generator.normal(size=(num_rows, B))
    done = generator.random((num_rows, B)) < 0.1
    truncated = done & (generator.random((num_rows, B)) < 0.5)
    done[0], truncated[0] = True, False
    fields = {"reward": reward, "done": done, "truncated": truncated}
    for i in range(num_rollouts):
        rows = slice(i * T, (i + 1) * T + 1)
        yield {name: torch.from_numpy(field[rows].copy()) for name, field in fields.items()}


def slow_returns(batches):
    """The discounted return at each step that happened, environment by environment."""
    found = []
    for b in range(B):
        total = 0.0
        for i, batch in enumerate(batches):
            if i == 0:
                assert batch["done"][0, b]
            for t in range(1, T + 1):
                if not batch["truncated"][t, b]:
                    total = GAMMA * total + batch["reward"][t, b].item()
                    found.append(total)
                if batch["done"][t, b]:
                    total = 0.0
    return np.array(found)


@pytest.mark.parametrize("shape", ["[B]", "[T+1, B]"])
def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return(shape):
    scale, batches = RewardScale(GAMMA), list(cut_into_rollouts(0, 30))
    source = torch.tensor([7, 1 << 40, 3, 0])
    for i, batch in enumerate(batches):
        columns = torch.randperm(B, generator=torch.Generator().manual_seed(i))
        shuffled = {name: field[:, columns] for name, field in batch.items()}
        shuffled["source"] = source[columns] if shape == "[B]" else source[columns].expand(T + 1, B)
        scale.observe(shuffled["reward"][1:], shuffled)
    expected = slow_returns(batches)
    assert scale.moments.count == len(expected)
    assert scale.moments.mean.item() == pytest.approx(expected.mean())
    assert scale.moments.variance.item() == pytest.approx(expected.var())
    rewards = torch.tensor([0.0, 1.0, -1e6], dtype=torch.float64)
    np.testing.assert_allclose(scale.scale(rewards), [0, 1 / expected.std(), -10], rtol=1e-6)


def test_an_environment_may_be_in_a_batch_more_than_once():
    """As with few environments: its rollouts stand in the order in which they were played."""
    scale, batches = RewardScale(GAMMA), list(cut_into_rollouts(1, 4))
    wide = {name: torch.cat([batch[name] for batch in batches], 1) for name in batches[0]}
    wide["source"] = torch.arange(B).repeat(4)
    scale.observe(wide["reward"][1:], wide)
    expected = slow_returns(batches)
    assert scale.moments.variance.item() == pytest.approx(expected.var())
    assert scale.moments.count == len(expected)


def test_rollouts_that_nobody_can_put_in_order_begin_at_zero():
    scale, (batch,) = RewardScale(GAMMA), cut_into_rollouts(2, 1)
    for _ in range(2):
        scale.observe(batch["reward"][1:], batch)
    assert scale.moments.variance.item() == pytest.approx(slow_returns([batch]).var())


def test_the_loss_is_that_of_clipped_and_scaled_rewards():
    flags = dataclasses.replace(FLAGS, reward_clipping="soft_asymmetric")
    learner, other, batch = make_learner(flags), make_learner(flags), random_batch()
    batch["done"][0] = True
    clipped = losses.clip_reward(batch["reward"], "soft_asymmetric")
    returns = slow_returns([{**batch, "reward": clipped}])
    by_hand = {**batch, "reward": (clipped / returns.std()).clamp(-10, 10)}
    other.model.observe_frames(batch["frame"], torch.ones(T, B, dtype=torch.bool))
    plain = dataclasses.replace(flags, reward_clipping="none")
    expected, _ = compute_loss(other.model, by_hand, (), plain)
    learner.step(batch, ())
    assert learner.stats.summary()["total_loss"] == pytest.approx(expected.item(), rel=1e-5)
