"""V-trace against an oracle written from the paper's sum (equation 1), one term at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbeast.core import vtrace


def oracle(log_rhos, discounts, rewards, values, bootstrap, rho_bar, pg_rho_bar, c_bar, lam, mask):
    T = len(log_rhos)
    vs, advantages = np.empty_like(values), np.empty_like(values)
    everything = np.ndindex(log_rhos.shape[1:])
    for place in everything:
        v = [*values[(slice(None), *place)], bootstrap[place]]
        rho = np.exp(log_rhos[(slice(None), *place)])
        r, gamma = rewards[(slice(None), *place)], discounts[(slice(None), *place)]
        happened = mask[(slice(None), *place)]
        targets = []
        for s in range(T):
            target, weight = v[s], 1.0
            for t in range(s, T):
                if not happened[t]:
                    break
                target += weight * min(rho_bar, rho[t]) * (r[t] + gamma[t] * v[t + 1] - v[t])
                weight *= gamma[t] * lam * min(c_bar, rho[t])
            targets.append(target)
        targets.append(v[T])
        for t in range(T):
            vs[(t, *place)] = targets[t]
            advantage = min(pg_rho_bar, rho[t]) * (r[t] + gamma[t] * targets[t + 1] - v[t])
            advantages[(t, *place)] = advantage if happened[t] else 0.0
    return vs, advantages


def random_inputs(rng, T, shape, done_rate, truncated_rate):
    size = (T, *shape)
    return {
        "log_rhos": rng.normal(0.0, 1.0, size),
        "discounts": 0.95 * (rng.random(size) >= done_rate),
        "rewards": rng.normal(0.0, 2.0, size),
        "values": rng.normal(0.0, 2.0, size),
        "bootstrap_value": rng.normal(0.0, 2.0, shape),
        "mask": rng.random(size) >= truncated_rate,
    }


def as_tensors(inputs):
    return {name: torch.from_numpy(np.asarray(value)) for name, value in inputs.items()}


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(1, 25),
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    done_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    truncated_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    rho_bar=st.sampled_from([0.5, 1.0, 3.7]),
    pg_rho_bar=st.sampled_from([0.7, 1.0]),
    c_bar=st.sampled_from([0.4, 1.0]),
    lam=st.sampled_from([0.0, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_vtrace_is_the_papers_sum(
    T, shape, done_rate, truncated_rate, rho_bar, pg_rho_bar, c_bar, lam, seed
):
    inputs = random_inputs(np.random.default_rng(seed), T, shape, done_rate, truncated_rate)
    got = vtrace.from_importance_weights(
        **as_tensors(inputs),
        clip_rho_threshold=rho_bar,
        clip_pg_rho_threshold=pg_rho_bar,
        clip_c_threshold=c_bar,
        lambda_=lam,
    )
    bootstrap = inputs.pop("bootstrap_value")
    vs, advantages = oracle(
        inputs["log_rhos"],
        inputs["discounts"],
        inputs["rewards"],
        inputs["values"],
        bootstrap,
        rho_bar,
        pg_rho_bar,
        c_bar,
        lam,
        inputs["mask"],
    )
    np.testing.assert_allclose(got.vs.numpy(), vs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.pg_advantages.numpy(), advantages, rtol=1e-9, atol=1e-9)


def test_truncation_in_the_middle_equals_two_rollouts():
    """Rows before the cut learn as if the rollout ended there; rows after, as if it began."""
    T, cut = 12, 5  # the transition from row 5 (the true final frame) to row 6 did not happen
    inputs = as_tensors(random_inputs(np.random.default_rng(0), T, (3,), 0.0, 0.0))
    inputs["mask"][cut] = False
    whole = vtrace.from_importance_weights(**inputs)

    names = ("log_rhos", "discounts", "rewards", "values")
    before = vtrace.from_importance_weights(
        **{name: inputs[name][:cut] for name in names}, bootstrap_value=inputs["values"][cut]
    )
    after = vtrace.from_importance_weights(
        **{name: inputs[name][cut + 1 :] for name in names},
        bootstrap_value=inputs["bootstrap_value"],
    )
    for part in ("vs", "pg_advantages"):
        torch.testing.assert_close(getattr(whole, part)[:cut], getattr(before, part))
        torch.testing.assert_close(getattr(whole, part)[cut + 1 :], getattr(after, part))
    torch.testing.assert_close(whole.vs[cut], inputs["values"][cut])
    assert (whole.pg_advantages[cut] == 0).all()


def test_on_policy_targets_are_the_discounted_returns():
    rewards = torch.tensor([[1.0], [2.0], [3.0]])
    got = vtrace.from_importance_weights(
        log_rhos=torch.zeros(3, 1),
        discounts=torch.full((3, 1), 0.5),
        rewards=rewards,
        values=torch.randn(3, 1),
        bootstrap_value=torch.tensor([8.0]),
    )
    torch.testing.assert_close(got.vs, torch.tensor([[3.75], [5.5], [7.0]]))


def test_masked_garbage_does_not_leak():
    """Padding may hold anything, also what is not a number."""
    inputs = as_tensors(random_inputs(np.random.default_rng(1), 6, (2,), 0.0, 0.0))
    inputs["mask"][3:, 0] = False
    inputs["rewards"][3:, 0] = float("nan")
    inputs["log_rhos"][3:, 0] = float("inf")
    got = vtrace.from_importance_weights(**inputs)
    assert got.vs.isfinite().all()
    assert got.pg_advantages.isfinite().all()


def test_from_logits_uses_the_probabilities_of_the_actions():
    generator = torch.Generator().manual_seed(0)
    T, B, A = 7, 3, 5
    behavior, target = (torch.randn(T, B, A, generator=generator) for _ in range(2))
    actions = torch.randint(A, (T, B), generator=generator)
    rest = {
        "discounts": torch.full((T, B), 0.9),
        "rewards": torch.randn(T, B, generator=generator),
        "values": torch.randn(T, B, generator=generator),
        "bootstrap_value": torch.randn(B, generator=generator),
    }
    got = vtrace.from_logits(behavior, target, actions, **rest)
    mu, pi = behavior.softmax(-1), target.softmax(-1)
    for t in range(T):
        for b in range(B):
            a = actions[t, b]
            expected = torch.log(pi[t, b, a] / mu[t, b, a])
            torch.testing.assert_close(got.log_rhos[t, b], expected, rtol=1e-4, atol=1e-5)
    from_weights = vtrace.from_importance_weights(got.log_rhos, **rest)
    torch.testing.assert_close(got.vs, from_weights.vs)
    torch.testing.assert_close(got.pg_advantages, from_weights.pg_advantages)
    torch.testing.assert_close(
        got.log_rhos, got.target_action_log_probs - got.behavior_action_log_probs
    )


def test_no_gradient_flows_through_the_targets():
    values = torch.randn(4, 2, requires_grad=True)
    got = vtrace.from_importance_weights(
        torch.zeros(4, 2), torch.ones(4, 2), torch.ones(4, 2), values, torch.zeros(2)
    )
    assert not got.vs.requires_grad
    assert not got.pg_advantages.requires_grad


@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 9, 80])
def test_suffix_scan_solves_the_recurrence(T):
    generator = torch.Generator().manual_seed(T)
    decays = torch.rand(T, 4, generator=generator, dtype=torch.float64)
    deltas = torch.randn(T, 4, generator=generator, dtype=torch.float64)
    expected, x = [], torch.zeros(4, dtype=torch.float64)
    for t in reversed(range(T)):
        x = deltas[t] + decays[t] * x
        expected.insert(0, x)
    torch.testing.assert_close(vtrace.suffix_scan(decays, deltas), torch.stack(expected))
