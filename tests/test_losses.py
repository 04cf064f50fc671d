"""The losses against plain sums, and the clipping of rewards."""

import math

import pytest
import torch

from torchbeast.core import losses


def random_policy(T=4, B=3, A=5):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, B, A, generator=generator)
    actions = torch.randint(A, (T, B), generator=generator)
    advantages = torch.randn(T, B, generator=generator)
    return logits, actions, advantages


def test_baseline_loss_is_half_the_sum_of_squares():
    advantages = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    assert losses.compute_baseline_loss(advantages).item() == pytest.approx(
        0.5 * (1 + 4 + 9 + 0.25)
    )


def test_entropy_loss_sums_p_log_p_where_the_mask_allows():
    logits, _, _ = random_policy()
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[1, 2] = mask[3, 0] = False
    expected_all = expected_masked = 0.0
    for t in range(4):
        for b in range(3):
            p = logits[t, b].exp() / logits[t, b].exp().sum()
            term = sum(float(x) * math.log(float(x)) for x in p)
            expected_all += term
            expected_masked += term if mask[t, b] else 0.0
    assert losses.compute_entropy_loss(logits).item() == pytest.approx(expected_all, rel=1e-5)
    assert losses.compute_entropy_loss(logits, mask).item() == pytest.approx(
        expected_masked, rel=1e-5
    )


def test_policy_gradient_loss_weighs_log_probabilities():
    logits, actions, advantages = random_policy()
    expected = 0.0
    for t in range(4):
        for b in range(3):
            log_prob = torch.log_softmax(logits[t, b], 0)[actions[t, b]]
            expected -= float(log_prob * advantages[t, b])
    got = losses.compute_policy_gradient_loss(logits, actions, advantages)
    assert got.item() == pytest.approx(expected, rel=1e-5)


def test_policy_gradient_does_not_flow_through_advantages():
    logits, actions, advantages = random_policy()
    logits.requires_grad_()
    advantages.requires_grad_()
    losses.compute_policy_gradient_loss(logits, actions, advantages).backward()
    assert logits.grad is not None
    assert advantages.grad is None


def test_rewards_are_clipped_as_asked():
    rewards = torch.tensor([-10.0, -0.5, 0.0, 0.5, 10.0])
    assert losses.clip_reward(rewards, "abs_one").tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert losses.clip_reward(rewards, "none").tolist() == rewards.tolist()
    soft = losses.clip_reward(rewards, "soft_asymmetric")
    expected = [(0.3 if r < 0 else 1.0) * 5 * math.tanh(r / 5) for r in rewards.tolist()]
    torch.testing.assert_close(soft, torch.tensor(expected))
    with pytest.raises(ValueError, match="reward_clipping must be one of"):
        losses.clip_reward(rewards, "hard")
