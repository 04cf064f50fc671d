"""Several passes over a batch, in parts, and the clipped surrogate, against slow oracles."""

import copy
import dataclasses
import math

import pytest
import torch

from libtorchbeast.specs import ArraySpec
from tests.helpers.specs import spec_for
from tests.test_learner import FLAGS, A, B, T, make_learner, random_batch
from torchbeast.core import losses, vtrace
from torchbeast.core.learner import Learner
from torchbeast.core.losses import compute_loss
from torchbeast.models import agent as agents
from torchbeast.models import make_model

ONE_EACH = dataclasses.replace(FLAGS, num_minibatches=B)


def targets_of(log_probs, advantages):
    mask = torch.ones_like(log_probs, dtype=torch.bool)
    return losses.Targets(advantages, advantages, log_probs, torch.zeros_like(log_probs), mask)


def test_the_surrogate_is_clipped_against_the_policy_of_the_targets():
    generator = torch.Generator().manual_seed(3)
    log_probs, before, advantages = torch.randn(3, 50, 4, generator=generator) * 0.5
    expected = 0.0
    for log_prob, log_prob_before, advantage in zip(
        *(x.flatten().tolist() for x in (log_probs, before, advantages)), strict=True
    ):
        ratio = math.exp(log_prob - log_prob_before)
        clipped = min(max(ratio, 0.8), 1.2)
        expected -= min(ratio * advantage, clipped * advantage)
    loss = losses.compute_surrogate_loss(log_probs, targets_of(before, advantages), 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1.0, False), (0.5, -1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (1.1, 1.0, True)],
)
def test_a_step_that_went_far_enough_has_no_gradient(ratio, advantage, moves):
    log_prob = torch.tensor([math.log(ratio)], requires_grad=True)
    targets = targets_of(torch.zeros(1), torch.tensor([advantage]))
    losses.compute_surrogate_loss(log_prob, targets, 0.2).backward()
    assert (log_prob.grad.item() != 0) == moves


def test_the_first_step_of_the_surrogate_is_that_of_vtrace():
    """Also with rollouts of another policy, and rows that did not happen."""
    batch, gradients = random_batch(), []
    batch["truncated"][4, 1] = True
    for clip_ratio in (None, 0.1):
        learner = make_learner(dataclasses.replace(FLAGS, clip_ratio=clip_ratio, optimizer="sgd"))
        learner.step(dict(batch), ())
        gradients.append([p.grad for p in learner.model.parameters()])
    for vtrace_gradient, surrogate_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(surrogate_gradient, vtrace_gradient)


def test_later_passes_of_the_surrogate_keep_the_targets_of_the_first():
    """Three passes by hand: targets once, then the clipped ratio to that first policy."""
    flags = dataclasses.replace(FLAGS, clip_ratio=0.02, num_passes=3, schedule="constant")
    learner, by_hand = make_learner(flags), make_learner(flags)
    learner.step(random_batch(), ())
    batch, model = random_batch(), by_hand.model
    rewards = batch["reward"][1:].clamp(-1, 1)
    with torch.no_grad():
        output, _ = model(batch)
        targets = losses.find_targets(output, batch, flags, rewards)
    for _ in range(3):
        output, _ = model(batch)
        log_probs = vtrace.action_log_probs(output["policy_logits"][:T], batch["action"])
        ratio = (log_probs - targets.log_probs).exp()
        gains = [ratio * targets.pg_advantages, ratio.clamp(0.98, 1.02) * targets.pg_advantages]
        loss = (
            -torch.minimum(*gains).sum()
            + 0.25 * ((targets.vs - output["baseline"][:T]) ** 2).sum()
            + 0.01 * losses.compute_entropy_loss(output["policy_logits"][:T])
        )
        by_hand.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
        by_hand.optimizer.step()
    for ours, theirs in zip(learner.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_normalised_advantages_ignore_padding_and_the_size_of_rewards():
    """Rewards and values times ten make the same policy gradient."""
    flags = dataclasses.replace(FLAGS, normalize_advantages=True, reward_clipping="none")
    batch = random_batch()
    batch["truncated"][3:, 0] = True
    batch["reward"][3:, 0] = 1e6  # of rows that did not happen
    pg_losses = []
    for scale in (1.0, 10.0):
        model = make_learner(flags).model
        with torch.no_grad():
            model.baseline.weight.mul_(scale)
        scaled = {**batch, "reward": batch["reward"] * scale}
        pg_losses.append(compute_loss(model, scaled, (), flags)[1]["pg_loss"].item())
    # A sum of terms of the order of 1, which may cancel out.
    assert pg_losses[1] == pytest.approx(pg_losses[0], abs=1e-4)
    mask = torch.tensor([[True, True], [True, False]])
    normal = losses.normalize(torch.tensor([[1.0, 2.0], [6.0, 1e9]]), mask)
    assert normal[1, 1] == 0
    torch.testing.assert_close(normal[mask].mean(), torch.tensor(0.0))
    torch.testing.assert_close(normal[mask].std(correction=0), torch.tensor(1.0))


def test_equal_advantages_stay_finite_when_they_are_normalised():
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert losses.normalize(torch.tensor([[3.0]]), mask).item() == 0.0


def test_two_passes_are_two_steps_of_the_optimizer_and_one_version():
    flags = dataclasses.replace(FLAGS, schedule="constant")
    learner = make_learner(dataclasses.replace(flags, num_passes=2))
    twice = make_learner(flags)
    learner.step(random_batch(), ())
    twice.step(random_batch(), ())
    twice.step(random_batch(), ())
    for ours, theirs in zip(learner.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (learner.version, learner.stats.step) == (1, T * B)


def test_every_pass_has_each_rollout_once_and_its_own_memory_with_it():
    """The columns and states that the model sees, in minibatches of rollouts."""
    torch.manual_seed(0)
    flags = dataclasses.replace(FLAGS, num_passes=6, num_minibatches=2)
    learner = make_learner(flags)
    seen = []
    forward = learner.model.forward

    def watch(batch, state):
        seen.append([(int(f), int(s)) for f, s in zip(batch["frame"][0, :, 0], state[0][0, :, 0],
                                                      strict=True)])  # fmt: skip
        return forward(batch, ())

    learner.model.forward = watch
    batch = random_batch()
    batch["frame"][:, :, 0] = torch.arange(B).float()
    learner.step(batch, (torch.arange(B).view(1, B, 1),))
    assert len(seen) == 12
    assert {len(part) for part in seen} == {1, 2}
    for i in range(0, 12, 2):
        assert sorted(seen[i] + seen[i + 1]) == [(k, k) for k in range(B)]
    assert len({tuple(sorted(part)) for part in seen}) > 2  # dealt out anew each time


def test_steps_of_all_rollouts_are_mixed_for_built_in_models_without_memory():
    flags = dataclasses.replace(FLAGS, num_passes=2, num_minibatches=3, clip_ratio=0.2)
    learner = make_learner(flags)
    seen = []
    forward = learner.model.forward

    def watch(batch, state):
        if torch.is_grad_enabled():
            seen.append(batch["frame"][..., 0].flatten().int().tolist())
        return forward(batch, state)

    learner.model.forward = watch
    batch = random_batch()
    batch["frame"][:, :, 0] = torch.arange((T + 1) * B).view(T + 1, B).float()
    learner.step(batch, ())
    assert [len(part) for part in seen] == [T * B // 3] * 6
    for i in (0, 3):  # all but the last row, which is the first of the next rollouts
        assert sorted(seen[i] + seen[i + 1] + seen[i + 2]) == list(range(T * B))


def test_mixed_steps_have_the_loss_of_their_rollouts():
    """Whether in rollouts or side by side: the same sum over the same steps."""
    flags = dataclasses.replace(FLAGS, clip_ratio=0.1)
    model, batch = make_learner().model, random_batch()
    batch["truncated"][4, 1] = True
    with torch.no_grad():
        output, _ = model(batch)
    output["policy_logits"] = output["policy_logits"] + 0.1  # found with other weights
    targets = losses.find_targets(output, batch, flags, batch["reward"][1:].clamp(-1, 1))
    whole, _ = compute_loss(model, batch, (), flags, targets=targets)
    steps, flat_targets = losses.flatten_steps(batch, targets)
    mixed, _ = compute_loss(model, steps, (), flags, targets=flat_targets)
    torch.testing.assert_close(mixed, whole)


@pytest.mark.parametrize("clip_ratio", [None, 0.2])
def test_a_bad_rollout_leaves_all_minibatches_and_harms_no_other(clip_ratio):
    flags = dataclasses.replace(
        ONE_EACH, num_passes=2, clip_ratio=clip_ratio, normalize_advantages=True
    )
    learner = make_learner(flags)
    batch = random_batch()
    batch["reward"][2, 0] = float("nan")
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert (summary["updates"], summary["step"]) == (1, 2 * T)
    assert summary["nonfinite_rollouts"] == 1  # though two passes met it
    assert "skipped_updates" not in summary
    assert all(p.isfinite().all() for p in learner.model.parameters())


def test_a_bad_rollout_beside_one_of_padding_alone_ends_nothing():
    learner, batch = make_learner(ONE_EACH), random_batch()
    batch["reward"][2, 0] = float("nan")
    batch["truncated"][1:, 1] = True
    learner.step(batch, ())
    summary = learner.stats.summary()
    assert (summary["updates"], summary["step"], summary["nonfinite_rollouts"]) == (1, T, 1)


def test_an_update_that_fails_after_some_steps_leaves_no_trace():
    learner = make_learner(dataclasses.replace(ONE_EACH, num_passes=2))
    learner.step(random_batch(), ())  # so that the optimizer has a state
    before = copy.deepcopy((learner.model.state_dict(), learner.optimizer.state_dict()["state"]))
    find_gradient, calls = learner._find_gradient, []

    def fail_at_the_third(*args):
        calls.append(1)
        metrics = find_gradient(*args)
        return {**metrics, "grad_norm": math.inf} if len(calls) % 3 == 0 else metrics

    learner._find_gradient = fail_at_the_third
    learner.step(random_batch(), ())
    assert learner.stats.summary()["skipped_updates"] == 1
    after = learner.model.state_dict(), learner.optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_rows_that_did_not_happen_have_no_ratio_however_far_the_policy_went():
    log_probs = torch.tensor([[0.0], [200.0]], requires_grad=True)
    targets = targets_of(torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]))
    targets = targets._replace(mask=torch.tensor([[True], [False]]))
    losses.compute_surrogate_loss(log_probs, targets, 0.2).backward()
    assert log_probs.grad.flatten().tolist() == [-1.0, 0.0]


def test_a_ratio_beyond_all_bounds_has_a_finite_gradient():
    log_probs = torch.tensor([500.0], requires_grad=True)
    targets = targets_of(torch.zeros(1), torch.tensor([-1.0]))
    losses.compute_surrogate_loss(log_probs, targets, 0.2).backward()
    assert log_probs.grad.isfinite().all()


def test_models_of_ones_own_see_whole_rollouts_unless_they_say_that_they_need_not():
    flags = dataclasses.replace(FLAGS, num_minibatches=B, clip_ratio=0.2)
    for sees_single_rows, num_rows in ((False, T + 1), (True, 1)):
        agent, seen = make_learner().model, []

        class Own(torch.nn.Module):
            def __init__(self, agent, says):
                super().__init__()
                self.agent, self.sees_single_rows = agent, says

            def forward(self, batch, state=(), seen=seen):
                if torch.is_grad_enabled():
                    seen.append(len(batch["done"]))
                return self.agent(batch, state)

        learner = Learner(Own(agent, sees_single_rows), flags, torch.device("cpu"))
        learner.step(random_batch(), ())
        assert seen == [num_rows] * B


def test_a_minibatch_of_padding_alone_is_no_step():
    learner, batch = make_learner(ONE_EACH), random_batch()
    batch["truncated"][1:, 1] = True
    steps = []
    learner.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    learner.step(batch, ())
    assert len(steps) == B - 1
    assert learner.stats.step == T * (B - 1)


def test_figures_of_an_update_are_means_over_its_steps():
    learner = make_learner(dataclasses.replace(ONE_EACH, learning_rate=1e-12))
    learner.step(random_batch(), ())
    entropy = learner.stats.summary()["entropy_loss"]
    whole = compute_loss(make_learner().model, random_batch(), (), FLAGS)[1]["entropy_loss"]
    assert entropy == pytest.approx(whole.item() / B, rel=1e-4)


def test_the_effective_sample_size_says_how_many_steps_carry_the_weight():
    assert losses.effective_sample_size(torch.full((8,), -3.0)).item() == pytest.approx(1.0)
    one_has_all = torch.tensor([50.0, 0.0, 0.0, 0.0])
    assert losses.effective_sample_size(one_has_all).item() == pytest.approx(0.25)
    weights = torch.tensor([1.0, 2.0, 3.0])
    expected = 36 / (3 * 14)
    assert losses.effective_sample_size(weights.log()).item() == pytest.approx(expected)


def test_more_parts_than_rollouts_are_as_many_as_rollouts():
    learner = make_learner(dataclasses.replace(FLAGS, num_minibatches=100))
    steps = []
    learner.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    learner.step(random_batch(), ())
    assert len(steps) == B


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("encoder", ["shallow", "deep"])
def test_frames_that_are_prepared_once_are_those_of_each_pass(encoder, use_lstm, monkeypatch):
    flags = dataclasses.replace(
        FLAGS, autocast="bf16", clip_ratio=0.2, num_passes=2, num_minibatches=B, optimizer="adam"
    )
    seen, weights = [], []
    for most in (agents.MAX_PREPARED_BYTES, 0):
        monkeypatch.setattr(agents, "MAX_PREPARED_BYTES", most)
        torch.manual_seed(5)
        spec = spec_for((4, 40, 36), A)
        model = make_model(encoder, spec, use_lstm=use_lstm, normalize_images=True)
        learner = make_learner(flags, model)
        images = model.encoder.images
        images.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        batch = random_batch()
        generator = torch.Generator().manual_seed(6)
        size = (T + 1, B, 4, 40, 36)
        batch["frame"] = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        learner.step(batch, model.initial_state(B))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert {torch.bfloat16, torch.uint8} == set(seen)
    for prepared, each in zip(*weights, strict=True):
        torch.testing.assert_close(prepared, each, rtol=0, atol=0)


def test_frames_are_prepared_for_no_model_that_may_look_at_them():
    class Own(agents.Agent):
        pass

    frame = torch.zeros(2, 3, 4, 40, 36, dtype=torch.uint8)
    assert Own((4, 40, 36), A).prepare_frames(frame) is frame
    tree = {"a": frame, "b": torch.zeros(2, 3, 5)}
    spec = {"a": ArraySpec("uint8", (4, 40, 36)), "b": ArraySpec("float32", (5,))}
    assert agents.Agent(spec, A).prepare_frames(tree) is tree
