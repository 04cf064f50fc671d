"""V-trace: off-policy value targets and advantages (Espeholt et al. 2018, section 4.1).

Shapes: T is time, B is batch, `...` any further dimensions. Transition t leads from row t to t+1.
Everything here is without gradient: targets and advantages are constants of the loss.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class VTraceReturns(NamedTuple):
    """Targets for the baseline and advantages for the policy gradient, both [T, B, ...]."""

    vs: Tensor
    pg_advantages: Tensor


class VTraceFromLogitsReturns(NamedTuple):
    """`VTraceReturns` and the log-probabilities that led to them, all [T, B, ...]."""

    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probability of `actions` [T, B, ...] under `policy_logits` [T, B, ..., num_actions]."""
    log_probs = F.log_softmax(policy_logits, dim=-1)
    return log_probs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    *,
    clip_c_threshold: float = 1.0,
    lambda_: float = 1.0,
    mask: Tensor | None = None,
) -> VTraceFromLogitsReturns:
    """V-trace for a softmax policy.

    Args:
        behavior_policy_logits: [T, B, ..., num_actions], of the policy that acted.
        target_policy_logits: [T, B, ..., num_actions], of the policy that learns.
        actions: [T, B, ...], the actions that were taken.
        discounts, rewards, values, bootstrap_value, ...: see `from_importance_weights`.
    """
    behavior_action_log_probs = action_log_probs(behavior_policy_logits, actions)
    target_action_log_probs = action_log_probs(target_policy_logits, actions)
    log_rhos = target_action_log_probs - behavior_action_log_probs
    vs, pg_advantages = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold,
        clip_pg_rho_threshold,
        clip_c_threshold=clip_c_threshold,
        lambda_=lambda_,
        mask=mask,
    )
    return VTraceFromLogitsReturns(
        vs, pg_advantages, log_rhos, behavior_action_log_probs, target_action_log_probs
    )


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    *,
    clip_c_threshold: float = 1.0,
    lambda_: float = 1.0,
    mask: Tensor | None = None,
) -> VTraceReturns:
    """V-trace from the log importance weights log(pi(a|x) / mu(a|x)).

    Args:
        log_rhos: [T, B, ...].
        discounts: [T, B, ...], of transition t: 0 where it ended an episode.
        rewards: [T, B, ...], of transition t.
        values: [T, B, ...], the baseline at row t.
        bootstrap_value: [B, ...], the baseline at row T.
        clip_rho_threshold: rho-bar, the clip of the weights in the value targets; None: no clip.
        clip_pg_rho_threshold: the clip of the weights in the advantages; None: no clip.
        clip_c_threshold: c-bar, the clip of the weights that propagate later TD errors back.
        lambda_: multiplies c; 1 is the plain V-trace, with less the baseline counts more.
        mask: [T, B, ...] of bool. False: transition t did not happen. Its target is the value of
            its row, its advantage is 0, and the rows before it bootstrap from that value.
    """
    rhos = log_rhos.exp()
    clipped_rhos = _clip(rhos, clip_rho_threshold)
    cs = lambda_ * rhos.clamp(max=clip_c_threshold)
    next_values = torch.cat([values[1:], bootstrap_value.unsqueeze(0)])

    deltas = clipped_rhos * (rewards + discounts * next_values - values)
    decays = discounts * cs
    if mask is not None:
        deltas = deltas.masked_fill(~mask, 0.0)
        decays = decays.masked_fill(~mask, 0.0)
    vs = values + suffix_scan(decays, deltas)

    next_vs = torch.cat([vs[1:], bootstrap_value.unsqueeze(0)])
    pg_advantages = _clip(rhos, clip_pg_rho_threshold) * (rewards + discounts * next_vs - values)
    if mask is not None:
        pg_advantages = pg_advantages.masked_fill(~mask, 0.0)
    return VTraceReturns(vs, pg_advantages)


def suffix_scan(decays: Tensor, deltas: Tensor) -> Tensor:
    """Solve x[t] = deltas[t] + decays[t] * x[t + 1], x[T] = 0, for all t in log2(T) steps.

    Before the round with `span`, sums[t] holds the part of x[t] that comes from the rows t to
    t + span - 1, and factors[t] the product of their decays: each round doubles the reach.
    """
    sums, factors = deltas.clone(), decays
    span = 1
    while span < len(sums):
        sums[:-span] += factors[: len(sums) - span] * sums[span:]
        factors = factors[:-span] * factors[span:]
        span *= 2
    return sums


def _clip(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
