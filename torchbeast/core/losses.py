"""The losses of IMPALA, summed over time and batch as in the paper, and the clipping of rewards."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
