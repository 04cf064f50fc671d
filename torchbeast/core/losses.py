"""The losses of IMPALA, summed over time and batch as in the paper, and the clipping of rewards.

Shapes: T is unroll_length, B the batch size; a batch has T+1 rows, the last is for bootstrapping.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libtorchbeast.tree import map_tree
from torchbeast.core import vtrace
from torchbeast.core.agent_output import as_output
from torchbeast.core.distributions import Categorical, Distribution
from torchbeast.core.settings import Settings

Batch = dict[str, Any]
"""Rows [T+1, B, ...] of the environment's fields, and `policy_logits`, `action` of the policy that
acted, [T, B, ...] or longer; `version` [T, B] or [B] of its weights, and `source` [T+1, B] or [B],
the number of the environment, if anybody knows them."""

REWARD_CLIPPING = ("abs_one", "soft_asymmetric", "none")


def compute_baseline_loss(advantages: Tensor) -> Tensor:
    """Half the sum of squares of `vs - baseline` [T, B]."""
    return 0.5 * torch.sum(advantages**2)


def compute_entropy_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative entropy of the policy, summed; `mask` [T, B] leaves out rows that did not happen."""
    policy = F.softmax(logits, dim=-1)
    log_policy = F.log_softmax(logits, dim=-1)
    negative_entropy = torch.sum(policy * log_policy, dim=-1)  # [T, B]
    if mask is not None:
        negative_entropy = negative_entropy.masked_fill(~mask, 0.0)
    return negative_entropy.sum()


def compute_policy_gradient_loss(logits: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """Sum of -log pi(action) * advantage; no gradient flows through the advantages."""
    cross_entropy = F.nll_loss(
        F.log_softmax(logits.flatten(0, -2), dim=-1),
        target=actions.flatten().long(),
        reduction="none",
    )
    return torch.sum(cross_entropy.view_as(advantages) * advantages.detach())


def sum_auxiliary(losses: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """The losses that a model returned with its output, each one number, weighted by the model.

    A loss is a number, or one for each row, [T+1, B] or [T, B]; `mask` [T, B] says which rows are
    learnt from. Row T does not count: it is row 0 of the next rollout.
    """
    sums = {}
    for name, loss in losses.items():
        T, B = mask.shape
        if loss.dim() > 0:
            if tuple(loss.shape) not in ((T, B), (T + 1, B)):
                raise ValueError(
                    f"The model's loss {name!r} must be one number or [T+1, B] = [{T + 1}, {B}] of "
                    f"them, got {list(loss.shape)}."
                )
            loss = loss[:T].masked_fill(~mask, 0.0).sum()
        sums[name] = loss.float()
    return sums


def clip_reward(reward: Tensor, how: str) -> Tensor:
    """The reward that is learnt from; what is reported is always the environment's own."""
    if how == "abs_one":
        return reward.clamp(-1, 1)
    if how == "soft_asymmetric":  # the paper's DMLab clip: losses count less than wins
        squeezed = torch.tanh(reward / 5.0)
        return torch.where(reward < 0, 0.3 * squeezed, squeezed) * 5.0
    if how == "none":
        return reward
    raise ValueError(f"reward_clipping must be one of {', '.join(REWARD_CLIPPING)}, got {how!r}.")


def clip_rewards(batch: Batch, flags: Settings) -> Tensor:
    """The rewards [T, B] of a batch's transitions, which lead from row t to row t + 1."""
    return clip_reward(batch["reward"][1:], flags.reward_clipping)


def compute_loss(
    model: nn.Module,
    batch: Batch,
    initial_state: tuple[Tensor, ...],
    flags: Settings,
    rewards: Tensor | None = None,
    distribution: Distribution | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """IMPALA's loss of a batch and the model's own, if it has any, and what to report about it.

    `rewards` [T, B] are those to learn from; None: the batch's, clipped. `distribution` is what the
    logits are the parameters of; None: a softmax policy's.
    """
    with autocast(batch["done"].device, flags.autocast):
        output, _ = model(batch, initial_state)
    output = as_output(output)
    auxiliary = output.get("losses", {})
    output = {name: output[name].float() for name in ("policy_logits", "baseline")}
    T = len(batch["reward"]) - 1
    # Transition t leads from row t to row t + 1: what it brought stands on row t + 1.
    rewards = clip_rewards(batch, flags) if rewards is None else rewards
    discounts = flags.discounting * (~batch["done"][1:]).float()
    mask = ~batch["truncated"][1:]
    logits, values = output["policy_logits"][:T], output["baseline"][:T]
    actions = map_tree(lambda x: x[:T], batch["action"])

    distribution = distribution or Categorical(logits.shape[-1])
    log_probs = distribution.log_prob(logits, actions)
    log_rhos = log_probs.detach() - distribution.log_prob(batch["policy_logits"][:T], actions)
    targets = vtrace.from_importance_weights(
        log_rhos=log_rhos,
        discounts=discounts,
        rewards=rewards,
        values=values,
        bootstrap_value=output["baseline"][T],
        clip_rho_threshold=flags.clip_rho_threshold,
        clip_pg_rho_threshold=flags.clip_pg_rho_threshold,
        clip_c_threshold=flags.clip_c_threshold,
        lambda_=flags.vtrace_lambda,
        mask=mask,
    )
    pg_loss = -(log_probs * targets.pg_advantages).sum()
    baseline_loss = flags.baseline_cost * compute_baseline_loss(targets.vs - values)
    entropy = distribution.entropy(logits).masked_fill(~mask, 0.0)
    entropy_loss = -flags.entropy_cost * entropy.sum()
    auxiliary_losses = sum_auxiliary(auxiliary, mask)
    total_loss = pg_loss + baseline_loss + entropy_loss + sum(auxiliary_losses.values())

    clipped = log_rhos[mask] > math.log(flags.clip_rho_threshold)
    metrics = {
        "total_loss": total_loss,
        "pg_loss": pg_loss,
        "baseline_loss": baseline_loss,
        "entropy_loss": entropy_loss,
        "clipped_rho_fraction": clipped.float().mean(),
        "explained_variance": explained_variance(values.detach()[mask], targets.vs[mask]),
    }
    if taken := [name for name in auxiliary_losses if name in metrics]:
        raise ValueError(f"A model's own loss needs another name than {taken[0]!r}.")
    return total_loss, {**metrics, **auxiliary_losses}


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Mixed precision for a forward pass, if `dtype` is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than a constant."""
    return 1.0 - (targets - values).var(correction=0) / targets.var(correction=0)
