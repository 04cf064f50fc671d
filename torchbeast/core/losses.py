"""The losses of IMPALA, summed over time and batch as in the paper, and the clipping of rewards.

Shapes: T is unroll_length, B the batch size; a batch has T+1 rows, the last is for bootstrapping.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from libtorchbeast.tree import map_tree
from torchbeast.core import vtrace
from torchbeast.core.agent_output import as_output
from torchbeast.core.distributions import Categorical, Distribution
from torchbeast.core.precision import autocast
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.settings import Settings

Batch = dict[str, Any]
"""Rows [T+1, B, ...] of the environment's fields, and `policy_logits`, `action` of the policy that
acted, [T, B, ...] or longer. If known, also the `version` of its weights, [T, B] or [B], and the
`source`, [T+1, B] or [B]: the number of the environment."""

MAX_LOG_RATIO = 20.0  # far beyond any clip
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


def compute_surrogate_loss(log_probs: Tensor, targets: "Targets", clip_ratio: float) -> Tensor:
    """PPO's clipped surrogate of V-trace's policy gradient, summed (Schulman et al. 2017).

    The ratio is to the policy with which the targets were found: it is 1 at the first step, where
    the gradient is V-trace's; beyond 1 +- `clip_ratio` there is nothing more to gain. The
    importance weights in the advantages correct for the policy that acted, which is older.
    """
    log_ratio = (log_probs - targets.log_probs).masked_fill(~targets.mask, 0.0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # kept finite
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return -torch.min(ratio * targets.pg_advantages, clipped * targets.pg_advantages).sum()


def normalize(advantages: Tensor, mask: Tensor, ranks: Ranks = ALONE) -> Tensor:
    """Advantages with mean 0 and deviation 1 over the masked-in steps of all ranks, 0 elsewhere."""
    counted = advantages[mask].double()
    mean, deviation = _moments_over(ranks, counted)
    normal = (advantages - mean.float()) / deviation.float().clamp(min=1e-8)
    return normal.masked_fill(~mask, 0.0)


def normalize_nothing(device: torch.device, ranks: Ranks) -> None:
    """`normalize` on a rank that has no advantages, but must take part in the sums."""
    _moments_over(ranks, torch.zeros(0, dtype=torch.float64, device=device))


def _moments_over(ranks: Ranks, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the numbers of all ranks, in float64, as squares are summed."""
    count = torch.full_like(numbers.sum(), len(numbers))
    sums = ranks.sum(torch.stack([count, numbers.sum(), numbers.square().sum()]))
    count, mean, square = sums[0], sums[1] / sums[0], sums[2] / sums[0]
    return mean, (square - mean.square()).clamp(min=0.0).sqrt()


def sum_auxiliary(losses: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sum each of the losses that a model returned with its output to one number.

    A loss is a number, or one for each row, [T+1, B] or [T, B]; `mask` [T, B] says which rows are
    learnt from. Row T does not count: it is row 0 of the next rollout. The model has weighted them.
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
    """The reward to learn from; the reported reward is always the environment's own."""
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


class Targets(NamedTuple):
    """V-trace's targets for a batch, all [T, B] and without gradient."""

    vs: Tensor
    pg_advantages: Tensor
    log_probs: Tensor
    """Log-probabilities of the actions, under the policy with which the targets were found."""
    log_rhos: Tensor
    """`log_probs` minus those under the policy that acted: the log importance weights."""
    mask: Tensor
    """False where a transition did not happen."""


def find_targets(
    output: dict[str, Tensor],
    batch: Batch,
    flags: Settings,
    rewards: Tensor,
    distribution: Distribution | None = None,
    ranks: Ranks = ALONE,
) -> Targets:
    """V-trace's targets from the model's `output` at the T+1 rows: `policy_logits`, `baseline`."""
    # Transition t leads from row t to row t + 1: its `done` and `truncated` are on row t + 1.
    T = len(rewards)
    distribution = distribution or Categorical(output["policy_logits"].shape[-1])
    actions = map_tree(lambda x: x[:T], batch["action"])
    log_probs = distribution.log_prob(output["policy_logits"][:T], actions).detach()
    log_rhos = log_probs - distribution.log_prob(batch["policy_logits"][:T], actions)
    mask = ~batch["truncated"][1:]
    vs, advantages = vtrace.from_importance_weights(
        log_rhos=log_rhos,
        discounts=flags.discounting * (~batch["done"][1:]).float(),
        rewards=rewards,
        values=output["baseline"][:T],
        bootstrap_value=output["baseline"][T],
        clip_rho_threshold=flags.clip_rho_threshold,
        clip_pg_rho_threshold=flags.clip_pg_rho_threshold,
        clip_c_threshold=flags.clip_c_threshold,
        lambda_=flags.vtrace_lambda,
        mask=mask,
    )
    if flags.normalize_advantages:
        advantages = normalize(advantages, mask, ranks)
    return Targets(vs, advantages, log_probs, log_rhos, mask)


def flatten_steps(batch: Batch, targets: Targets) -> tuple[Batch, Targets]:
    """The steps of all rollouts side by side, [T, B, ...] -> [1, T*B, ...], to be mixed.

    For models whose output for a row depends on that row alone.
    """
    T = len(targets.mask)

    def flatten(x: Tensor) -> Tensor:
        return x[:T].flatten(0, 1).unsqueeze(0)

    of_rollouts = ("version", "source")
    steps = {name: field for name, field in batch.items() if name not in of_rollouts}
    return map_tree(flatten, steps), map_tree(flatten, targets)


def run_model(
    model: nn.Module, batch: Batch, initial_state: tuple[Tensor, ...], flags: Settings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's `policy_logits` and `baseline` at the T+1 rows, and its own losses."""
    with autocast(batch["done"].device, flags.autocast):
        output, _ = model(batch, initial_state)
    output = as_output(output)
    said = {name: output[name].float() for name in ("policy_logits", "baseline")}
    return said, output.get("losses", {})


def compute_loss(
    model: nn.Module,
    batch: Batch,
    initial_state: tuple[Tensor, ...],
    flags: Settings,
    rewards: Tensor | None = None,
    distribution: Distribution | None = None,
    targets: Targets | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, IMPALA's and the model's own, and the figures to report about it.

    `rewards` [T, B] are those to learn from; None: the batch's, clipped. `distribution` is that of
    the actions, whose parameters are the logits; None: a softmax policy's. `targets` may have been
    found before, with older weights; None: they are found here, normalised over all `ranks`.
    """
    output, auxiliary = run_model(model, batch, initial_state, flags)
    distribution = distribution or Categorical(output["policy_logits"].shape[-1])
    if targets is None:
        rewards = clip_rewards(batch, flags) if rewards is None else rewards
        targets = find_targets(output, batch, flags, rewards, distribution, ranks)
    T, mask = len(targets.mask), targets.mask
    logits, values = output["policy_logits"][:T], output["baseline"][:T]
    log_probs = distribution.log_prob(logits, map_tree(lambda x: x[:T], batch["action"]))
    if flags.clip_ratio is None:
        pg_loss = -(log_probs * targets.pg_advantages).sum()
    else:
        pg_loss = compute_surrogate_loss(log_probs, targets, flags.clip_ratio)
    baseline_loss = flags.baseline_cost * compute_baseline_loss(
        (targets.vs - values).masked_fill(~mask, 0.0)
    )
    entropy = distribution.entropy(logits).masked_fill(~mask, 0.0)
    entropy_loss = -flags.entropy_cost * entropy.sum()
    auxiliary_losses = sum_auxiliary(auxiliary, mask)
    total_loss = pg_loss + baseline_loss + entropy_loss + sum(auxiliary_losses.values())

    log_rhos = targets.log_rhos[mask]
    metrics = {
        "total_loss": total_loss,
        "pg_loss": pg_loss,
        "baseline_loss": baseline_loss,
        "entropy_loss": entropy_loss,
        "clipped_rho_fraction": (log_rhos > math.log(flags.clip_rho_threshold)).float().mean(),
        "effective_sample_size": effective_sample_size(log_rhos),
        "explained_variance": explained_variance(values.detach()[mask], targets.vs[mask]),
    }
    if taken := [name for name in auxiliary_losses if name in metrics]:
        raise ValueError(f"A model's own loss needs another name than {taken[0]!r}.")
    return total_loss, {**metrics, **auxiliary_losses}


class Loss(nn.Module):
    """`compute_loss` as a module, which DistributedDataParallel can wrap.

    `nothing` is a parameter on which only the loss of a rank without rollouts depends.
    """

    def __init__(
        self, model: nn.Module, flags: Settings, distribution: Distribution | None, ranks: Ranks
    ) -> None:
        super().__init__()
        self.model = model
        device = next((p.device for p in model.parameters()), None)
        self.nothing = nn.Parameter(torch.zeros((), device=device))
        self._flags = flags
        self._distribution = distribution
        self._ranks = ranks

    def forward(
        self,
        batch: Batch | None,
        initial_state: tuple[Tensor, ...] = (),
        rewards: Tensor | None = None,
        targets: Targets | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Without a batch the loss is 0: this rank takes part in the others' backward pass."""
        if batch is None:
            if self._flags.normalize_advantages and self._flags.clip_ratio is None:
                normalize_nothing(self.nothing.device, self._ranks)
            return 0.0 * self.nothing, {}
        return compute_loss(
            self.model,
            batch,
            initial_state,
            self._flags,
            rewards,
            self._distribution,
            targets,
            self._ranks,
        )


def effective_sample_size(log_rhos: Tensor) -> Tensor:
    """(sum of weights)^2 / (N * sum of their squares): 1 if all weigh the same, 1/N if one has all.

    It says how much the data are worth to the policy that learns. 1 if there are no weights.
    """
    if len(log_rhos) == 0:
        return torch.ones_like(log_rhos.sum())
    weights = (log_rhos - log_rhos.max()).exp()
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than a constant."""
    return 1.0 - (targets - values).var(correction=0) / targets.var(correction=0)
