"""Distributions over actions, against PyTorch's own, and by their properties."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as oracle

from torchbeast.core.distributions import (
    MAX_LOG_STD,
    MIN_LOG_STD,
    Bernoulli,
    Categorical,
    Gaussian,
    Joint,
    MultiCategorical,
    SquashedGaussian,
)
from torchbeast.core.losses import compute_entropy_loss
from torchbeast.core.vtrace import action_log_probs

LOW = np.array([-2.0, 0.0, -0.5], np.float32)
HIGH = np.array([2.0, 1.0, 0.25], np.float32)
NVEC = [2, 5, 3]
FAMILIES = {
    "categorical": Categorical(5),
    "multi": MultiCategorical(NVEC),
    "grid": MultiCategorical([3, 2, 4, 2], shape=(2, 2)),
    "bits": Bernoulli((2, 2)),
    "gaussian": Gaussian(LOW, HIGH),
    "unbounded": Gaussian(np.full((2, 1), -np.inf), np.full((2, 1), np.inf)),
    "squashed": SquashedGaussian(LOW, HIGH),
    "joint": Joint({"move": Categorical(3), "aim": (Gaussian(LOW, HIGH), Bernoulli((2,)))}),
}


def random_params(family, *batch, seed=0, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*batch, family.num_params, generator=generator)


def as_oracle(name, params):
    """PyTorch's distribution with these parameters; actions as it knows them."""
    if name == "categorical":
        return oracle.Categorical(logits=params)
    if name == "bits":
        return oracle.Independent(oracle.Bernoulli(logits=params), 1)
    mean, log_std = params.chunk(2, dim=-1)
    limit = torch.where(log_std > 0, MAX_LOG_STD, -MIN_LOG_STD)
    normal = oracle.Normal(mean, (log_std / (1 + (log_std / limit) ** 2).sqrt()).exp())
    middle, scale = torch.tensor((LOW + HIGH) / 2), torch.tensor((HIGH - LOW) / 2)
    if name == "unbounded":
        return oracle.Independent(normal, 1)
    moves = [oracle.AffineTransform(middle, scale)]
    if name == "squashed":
        moves.insert(0, oracle.TanhTransform())
    return oracle.Independent(oracle.TransformedDistribution(normal, moves), 1)


@pytest.mark.parametrize("name", ["categorical", "bits", "gaussian", "unbounded", "squashed"])
def test_log_probabilities_are_those_of_pytorch(name):
    family = FAMILIES[name]
    torch.manual_seed(0)
    params = random_params(family, 4, 3, scale=0.3).double()  # tanh well within the bounds
    action = family.sample(params)
    flat = action if name == "categorical" else action.flatten(2).to(params.dtype)
    expected = as_oracle(name, params).log_prob(flat)
    torch.testing.assert_close(family.log_prob(params, action), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["categorical", "bits", "unbounded"])
def test_entropies_are_those_of_pytorch(name):
    params = random_params(FAMILIES[name], 4, 3)
    expected = as_oracle(name, params).entropy()
    torch.testing.assert_close(FAMILIES[name].entropy(params), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_entropy_is_the_mean_of_what_draws_are_unlikely(name):
    torch.manual_seed(1)
    family = FAMILIES[name]
    params = random_params(family, 1, scale=0.7).expand(40_000, -1)
    surprise = -family.log_prob(params, family.sample(params))
    error = surprise.std() / math.sqrt(len(surprise))
    assert abs(surprise.mean() - family.entropy(params)[0]) < 5 * error + 1e-3


def test_several_choices_are_as_many_categoricals():
    family = FAMILIES["multi"]
    params = random_params(family, 6)
    action = family.sample(params)
    parts = [oracle.Categorical(logits=p) for p in params.split(NVEC, dim=-1)]
    expected = sum(part.log_prob(a) for part, a in zip(parts, action.unbind(-1), strict=True))
    torch.testing.assert_close(family.log_prob(params, action), expected)
    torch.testing.assert_close(family.entropy(params), sum(part.entropy() for part in parts))


def test_a_tree_of_actions_is_independent_at_its_leaves():
    family = FAMILIES["joint"]
    params = random_params(family, 2, 3)
    action = family.sample(params)
    assert action["move"].shape == (2, 3)
    assert action["aim"][0].shape == (2, 3, 3)
    assert action["aim"][1].shape == (2, 3, 2)
    aim, bits, move = params.split([6, 2, 3], dim=-1)  # by the keys' order: aim, then move
    expected = (
        Gaussian(LOW, HIGH).log_prob(aim, action["aim"][0])
        + Bernoulli((2,)).log_prob(bits, action["aim"][1])
        + Categorical(3).log_prob(move, action["move"])
    )
    torch.testing.assert_close(family.log_prob(params, action), expected)


def test_discrete_actions_have_the_losses_that_they_always_had():
    family, params = Categorical(5), random_params(Categorical(5), 4, 3)
    action = family.sample(params)
    torch.testing.assert_close(family.log_prob(params, action), action_log_probs(params, action))
    torch.testing.assert_close(-family.entropy(params).sum(), compute_entropy_loss(params))


@pytest.mark.parametrize(
    "name", sorted(FAMILIES.keys() - {"squashed"})
)  # there it is tanh of the mean
def test_the_mode_is_no_less_likely_than_any_draw(name):
    family = FAMILIES[name]
    params = random_params(family, 200)
    best = family.log_prob(params, family.mode(params))
    assert (best >= family.log_prob(params, family.sample(params)) - 1e-5).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]))
@pytest.mark.parametrize("name", FAMILIES)
def test_everything_stays_finite(name, seed, scale):
    family = FAMILIES[name]
    params = random_params(family, 3, seed=seed, scale=scale).requires_grad_()
    loss = (family.log_prob(params, family.sample(params)) + family.entropy(params)).sum()
    loss.backward()
    assert loss.isfinite()
    assert params.grad.isfinite().all()


def test_squashed_actions_stay_within_the_bounds():
    family = FAMILIES["squashed"]
    action = family.sample(random_params(family, 1000, scale=10.0))
    assert (action >= torch.tensor(LOW) - 1e-6).all()
    assert (action <= torch.tensor(HIGH) + 1e-6).all()


def test_a_bounded_gaussian_begins_between_the_bounds():
    family = FAMILIES["gaussian"]
    torch.testing.assert_close(
        family.mode(torch.zeros(family.num_params)), torch.tensor((LOW + HIGH) / 2)
    )


# --- Masks ------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_masked_actions_are_never_taken(seed, data):
    family = Categorical(6)
    allowed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=6, max_size=6).filter(any)))
    params = random_params(family, 500, seed=seed, scale=5.0).requires_grad_()
    masked = family.mask(params, allowed.expand(500, 6))
    assert allowed[family.sample(masked)].all()
    assert allowed[family.mode(masked)].all()
    (family.entropy(masked) + family.log_prob(masked, family.sample(masked))).sum().backward()
    assert params.grad.isfinite().all()
    assert (params.grad[:, ~allowed] == 0).all()
    only = params.detach()[:, allowed]
    torch.testing.assert_close(
        family.entropy(masked).detach(), oracle.Categorical(logits=only).entropy()
    )


def test_where_no_action_is_allowed_all_are():
    params = random_params(Categorical(4), 2)
    torch.testing.assert_close(Categorical(4).mask(params, torch.zeros(2, 4)), params)


def test_masks_of_several_choices_and_of_bits():
    family = MultiCategorical([2, 3])
    allowed = torch.tensor([1, 0, 0, 1, 1])
    action = family.sample(family.mask(random_params(family, 300), allowed.expand(300, 5)))
    assert (action[:, 0] == 0).all()
    assert (action[:, 1] > 0).all()
    bits = Bernoulli((3,))
    action = bits.sample(
        bits.mask(random_params(bits, 300), torch.tensor([1, 0, 1]).expand(300, 3))
    )
    assert (action[:, 1] == 0).all()
    assert action[:, 0].any()


# --- Limits -----------------------------------------------------------------------------------


def test_one_set_of_logits_without_other_dimensions_will_do():
    for family in (Categorical(3), MultiCategorical([2, 3])):
        params = random_params(family)
        assert family.log_prob(params, family.sample(params)).shape == ()


def test_huge_bounds_are_none():
    family = Gaussian(np.array([-3e38, -1.0]), np.array([3e38, 1.0]))
    assert family.bounded.tolist() == [False, True]
    action = family.sample(torch.zeros(1000, 4))
    assert action.abs().max() < 100
    with pytest.raises(ValueError, match="need bounds within 1,000,000"):
        SquashedGaussian(np.array([-1e6]), np.array([1e6]))


def test_a_deviation_at_its_limit_has_a_gradient():
    """Of log_std: 0 at 0 with slope 1, within the limits, and never flat."""
    family = Gaussian(np.full(1, -np.inf), np.full(1, np.inf))
    x = torch.tensor([-200.0, -50.0, -5.0, 0.0, 2.0, 20.0, 100.0], requires_grad=True)
    entropy = family.entropy(torch.stack([torch.zeros_like(x), x], dim=-1))
    log_std = entropy - 0.5 * math.log(2 * math.pi * math.e)
    assert abs(log_std[3].item()) < 1e-6
    assert (log_std.diff() > 0).all()
    assert ((log_std >= MIN_LOG_STD - 1e-4) & (log_std <= MAX_LOG_STD + 1e-4)).all()
    (slope,) = torch.autograd.grad(entropy.sum(), x)
    assert slope[3] == 1
    assert (slope > 0).all()
    assert family.sample(torch.tensor([0.0, 1e38])).isfinite().all()
