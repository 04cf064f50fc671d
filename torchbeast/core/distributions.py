"""Distributions over actions, made from an action space.

A distribution object holds no parameters; it defines what they mean. `policy_logits`
[..., num_params] is the flat vector of all parameters, with any leading dimensions. Actions are
[..., *shape], or trees of such tensors for Dict and Tuple spaces.

    Discrete       one logit for each action
    MultiDiscrete  the logits of each part, one after the other
    MultiBinary    one logit for each bit
    Box            means, then logarithms of standard deviations

The learner uses only `log_prob` and `entropy`, so that V-trace and the losses are the same for all
of them.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from libtorchbeast.specs import ArraySpec, describe
from libtorchbeast.tree import leaves_of, map_tree
from torchbeast.core.vtrace import action_log_probs

IMPOSSIBLE = -1e9
"""The logit of a masked action: its probability is exactly 0, and all gradients are finite."""

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0

MAX_BOUND = 1e6
"""Bounds beyond this count as infinite: they are not meant as the scale of actions."""


class Distribution(Protocol):
    """A family of distributions over the actions of one space."""

    num_params: int
    num_choices: int
    """Parameters that belong to choices of an action mask; 0 for a Box."""
    constant_params: Tensor
    """[num_params] of bool: parameters that should not depend on the state, such as deviations."""

    def sample(self, params: Tensor) -> Any:
        """An action drawn at random, without gradient."""

    def mode(self, params: Tensor) -> Any:
        """The most likely action."""

    def log_prob(self, params: Tensor, action: Any) -> Tensor:
        """The log-probability of an action, [...]."""

    def entropy(self, params: Tensor) -> Tensor:
        """The entropy of the distribution, [...]."""

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """The parameters with which only `allowed` choices have a probability.

        `allowed` [..., num_choices] is 0 for what is impossible (`libtorchbeast/action_masks.py`).
        """


def make_distribution(action: Any, squash: bool = False) -> Distribution:
    """The distribution for actions with this spec, or tree of specs.

    `squash` is for Boxes with bounds: samples go through tanh, and are never outside.
    """
    if isinstance(action, ArraySpec):
        return _for_array(action, squash)
    parts = map_tree(lambda leaf: _for_array(leaf, squash), action)
    if not list(leaves_of(parts)):
        raise ValueError(f"An action must have a part to choose, got {describe(action)}.")
    return Joint(parts)


def _for_array(action: ArraySpec, squash: bool) -> Distribution:
    counts = action.num_categories
    if counts and not action.shape:
        return Categorical(counts[0])
    if action.is_bits:
        return Bernoulli(action.shape)
    if counts:
        return MultiCategorical(counts, action.shape)
    if np.issubdtype(action.dtype, np.floating):
        return (SquashedGaussian if squash else Gaussian)(*action.bounds)
    low, high = action.bounds
    if np.issubdtype(action.dtype, np.integer) and np.isfinite(high - low).all():
        raise ValueError(
            f"Whole numbers in a Box are not supported as actions, got {action} from {low.min():g} "
            f"to {high.max():g}; wrap the environment so that its action_space is MultiDiscrete."
        )
    raise ValueError(
        f"Actions must say how many there are, or be floats, got {action}; see Gymnasium's "
        "Discrete, MultiDiscrete, MultiBinary and Box."
    )


class Categorical:
    """One of `n` actions."""

    def __init__(self, n: int) -> None:
        self.num_params = self.num_choices = n
        self.constant_params = torch.zeros(n, dtype=torch.bool)

    def sample(self, params: Tensor) -> Tensor:
        # The argmax of log p - log q, with q exponential, is distributed like p. Parameters that
        # are not finite give an action, too; the learner detects them.
        q = torch.empty_like(params, dtype=torch.float32).exponential_()
        return (params.detach() - q.log_()).argmax(dim=-1)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(dim=-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        return action_log_probs(params, action)

    def entropy(self, params: Tensor) -> Tensor:
        log_probs = F.log_softmax(params, dim=-1)
        return -(log_probs.exp() * log_probs).sum(dim=-1)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """`allowed` [..., n]; a mask that allows nothing is ignored."""
        allowed = allowed.bool()
        allowed = allowed | ~allowed.any(dim=-1, keepdim=True)
        return params.masked_fill(~allowed, IMPOSSIBLE)


class MultiCategorical:
    """Several independent choices, `shape` of them, the i-th among `nvec[i]`."""

    def __init__(self, nvec: Sequence[int], shape: tuple[int, ...] | None = None) -> None:
        self._size = len(nvec)
        self._shape = (self._size,) if shape is None else shape
        self._choices = Joint(tuple(Categorical(n) for n in nvec))
        self.num_params = self.num_choices = self._choices.num_params
        self.constant_params = self._choices.constant_params

    def sample(self, params: Tensor) -> Tensor:
        return self._join(self._choices.sample(params))

    def mode(self, params: Tensor) -> Tensor:
        return self._join(self._choices.mode(params))

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        choices = action.reshape(*params.shape[:-1], self._size).unbind(-1)
        return self._choices.log_prob(params, choices)

    def entropy(self, params: Tensor) -> Tensor:
        return self._choices.entropy(params)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """`allowed` [..., sum(nvec)]: the masks of all parts, one after the other."""
        return self._choices.mask(params, allowed)

    def _join(self, choices: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(choices), dim=-1).view(*choices[0].shape, *self._shape)


class Bernoulli:
    """Independent bits."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self.num_params = self.num_choices = math.prod(shape)
        self.constant_params = torch.zeros(self.num_params, dtype=torch.bool)

    def sample(self, params: Tensor) -> Tensor:
        return self._as_bits(torch.bernoulli(torch.sigmoid(params.detach().nan_to_num())))

    def mode(self, params: Tensor) -> Tensor:
        return self._as_bits(params > 0)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        bits = action.reshape(params.shape).to(params.dtype)
        return -F.binary_cross_entropy_with_logits(params, bits, reduction="none").sum(dim=-1)

    def entropy(self, params: Tensor) -> Tensor:
        p = torch.sigmoid(params)
        return F.binary_cross_entropy_with_logits(params, p, reduction="none").sum(dim=-1)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """`allowed` [..., num_choices]: the bits that may be 1."""
        return params.masked_fill(~allowed.bool(), IMPOSSIBLE)

    def _as_bits(self, bits: Tensor) -> Tensor:
        return bits.to(torch.int8).view(*bits.shape[:-1], *self._shape)


class Gaussian:
    """Independent normal distributions, in units in which a bounded action goes from -1 to 1.

    A sample may lie outside of the bounds: it is clipped for the environment, and the learner uses
    the sample as it is.
    """

    num_choices = 0

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        """`low` and `high` have the action's shape; beyond MAX_BOUND there is no bound."""
        self._shape = low.shape
        self._size = math.prod(low.shape)
        self.num_params = 2 * self._size
        self.constant_params = torch.arange(self.num_params) >= self._size
        bounded = (low < high) & (np.maximum(abs(low), abs(high)) < MAX_BOUND)
        with np.errstate(invalid="ignore"):  # inf - inf, where it is not used
            middle = np.where(bounded, low / 2 + high / 2, 0.0)
            scale = np.where(bounded, high / 2 - low / 2, 1.0)
        self.bounded = torch.from_numpy(bounded.reshape(-1))
        self._middle = torch.from_numpy(middle.astype(np.float32).reshape(-1))
        self._scale = torch.from_numpy(scale.astype(np.float32).reshape(-1))

    def sample(self, params: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(params.detach().nan_to_num())
        return self._to_action(torch.normal(mean, log_std.exp()))

    def mode(self, params: Tensor) -> Tensor:
        return self._to_action(self._mean_and_log_std(params)[0])

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(params)
        draw = self._from_action(action, params)
        return (_normal_log_prob(draw, mean, log_std) - self._log_scale(params)).sum(dim=-1)

    def entropy(self, params: Tensor) -> Tensor:
        _, log_std = self._mean_and_log_std(params)
        return (log_std + _NORMAL_ENTROPY + self._log_scale(params)).sum(dim=-1)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        raise ValueError("Actions of a Box cannot be masked; mask those of a Discrete space.")

    def _mean_and_log_std(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = params.split(self._size, dim=-1)
        return mean, _soft_bound(log_std)

    def _to_action(self, draw: Tensor) -> Tensor:
        action = self._middle.to(draw.device) + self._scale.to(draw.device) * draw
        return action.view(*draw.shape[:-1], *self._shape)

    def _from_action(self, action: Tensor, params: Tensor) -> Tensor:
        flat = action.reshape(*params.shape[:-1], self._size).to(params.dtype)
        return (flat - self._middle.to(params.device)) / self._scale.to(params.device)

    def _log_scale(self, params: Tensor) -> Tensor:
        return self._scale.to(params.device).log()


class SquashedGaussian(Gaussian):
    """The tanh of normal distributions, scaled to the bounds."""

    def __init__(self, low: np.ndarray, high: np.ndarray) -> None:
        super().__init__(low, high)
        if not self.bounded.all():
            raise ValueError(
                f"Squashed actions need bounds within {MAX_BOUND:,.0f}, got {low} to {high}; leave "
                "--squash_actions out."
            )

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(params)
        limit = 1 - 1e-6  # atanh of a float32 that is rounded to a bound is infinite
        draw = torch.atanh(self._from_action(action, params).clamp(-limit, limit))
        log_prob = _normal_log_prob(draw, mean, log_std) - _log_tanh_slope(draw)
        return (log_prob - self._log_scale(params)).sum(dim=-1)

    def entropy(self, params: Tensor) -> Tensor:
        """The normal distribution's, plus the mean of log tanh' by Gauss-Hermite quadrature."""
        mean, log_std = self._mean_and_log_std(params)
        points = torch.tensor(_POINTS, dtype=params.dtype, device=params.device)
        weights = torch.tensor(_WEIGHTS, dtype=params.dtype, device=params.device)
        draws = mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * points  # [..., size, points]
        slope = (_log_tanh_slope(draws) * weights).sum(dim=-1)
        return (log_std + _NORMAL_ENTROPY + slope + self._log_scale(params)).sum(dim=-1)

    def _to_action(self, draw: Tensor) -> Tensor:
        return super()._to_action(torch.tanh(draw))


class Joint:
    """Independent distributions at the leaves of a tree, for Dict and Tuple spaces."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._leaves = [part for _, part in leaves_of(parts)]
        self._sizes = [part.num_params for part in self._leaves]
        self.num_params = sum(self._sizes)
        self.num_choices = sum(part.num_choices for part in self._leaves)
        self.constant_params = torch.cat([part.constant_params for part in self._leaves])

    def sample(self, params: Tensor) -> Any:
        return self._pack(part.sample(p) for part, p in self._split(params))

    def mode(self, params: Tensor) -> Any:
        return self._pack(part.mode(p) for part, p in self._split(params))

    def log_prob(self, params: Tensor, action: Any) -> Tensor:
        pairs = zip(self._split(params), leaves_of(action), strict=True)
        return torch.stack([part.log_prob(p, leaf) for (part, p), (_, leaf) in pairs]).sum(dim=0)

    def entropy(self, params: Tensor) -> Tensor:
        return torch.stack([part.entropy(p) for part, p in self._split(params)]).sum(dim=0)

    def mask(self, params: Tensor, allowed: Tensor) -> Tensor:
        """`allowed` [..., num_choices] has no entries for Boxes, which stay as they are."""
        masks = allowed.split([part.num_choices for part in self._leaves], dim=-1)
        pairs = zip(self._split(params), masks, strict=True)
        masked = [part.mask(p, mask) if part.num_choices else p for (part, p), mask in pairs]
        return torch.cat(masked, dim=-1)

    def _split(self, params: Tensor) -> list[tuple[Any, Tensor]]:
        return list(zip(self._leaves, params.split(self._sizes, dim=-1), strict=True))

    def _pack(self, leaves: Any) -> Any:
        by_part = {id(part): leaf for part, leaf in zip(self._leaves, leaves, strict=True)}
        return map_tree(lambda part: by_part[id(part)], self._parts)


_NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
# Gauss-Hermite quadrature: the mean of a function of a standard normal variable.
_POINTS, _WEIGHTS = (x.tolist() for x in np.polynomial.hermite_e.hermegauss(24))
_WEIGHTS = [w / math.sqrt(2 * math.pi) for w in _WEIGHTS]


def _soft_bound(log_std: Tensor) -> Tensor:
    """Squeeze `log_std` smoothly between its limits, with value 0 and slope 1 at 0.

    The slope is nowhere 0, so that a value at a limit can come back.
    """
    limit = torch.where(log_std > 0, MAX_LOG_STD, -MIN_LOG_STD)
    return log_std / torch.hypot(torch.ones_like(log_std), log_std / limit)


def _normal_log_prob(draw: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * ((draw - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)


def _log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), also where tanh rounds to 1."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))
