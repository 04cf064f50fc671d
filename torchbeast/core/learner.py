"""One update of IMPALA, shared by both beasts: a batch of rollouts in, new weights out.

Shapes: T is unroll_length, B the batch size; a batch has T+1 rows, the last is for bootstrapping.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchbeast.core import losses, vtrace
from torchbeast.core.settings import Settings
from torchbeast.core.stats import RunningStats
from torchbeast.models import as_output

Batch = dict[str, Any]
"""Rows [T+1, B, ...] of the environment's fields, and `policy_logits`, `action` of the policy that
acted, [T, B, ...] or longer; `version` [T, B] or [B] of its weights, if anybody knows it."""

Publish = Callable[[nn.Module, int], None]
"""Gives the agent a model's weights and their version."""


class Learner:
    """A model, its optimizer and their statistics; `update` for any thread, the rest under `lock`.

    `finished` is set after `total_steps`, or by whoever ends the run; then nothing is learnt.
    `wrap` stands between model and loss: the place for what must see every forward and backward
    pass, such as DistributedDataParallel. Weights, checkpoints and actors know `model` alone.
    """

    def __init__(
        self,
        model: nn.Module,
        flags: Settings,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        lock: "threading.Lock | None" = None,
        stats: RunningStats | None = None,
    ) -> None:
        """`lock` and `stats` may be shared with other learners of the same model."""
        self.model = model.to(device)
        if flags.compile:
            self.model.compile()
        self._wrapped = wrap(self.model)
        self.flags = flags
        self.device = device
        self.lock = lock or threading.Lock()
        self.finished = threading.Event()
        self.stats = stats or RunningStats()
        self.optimizer = optimizer or make_optimizer(self.model, flags)
        # By steps taken, not by updates: exact whatever the batches held, also after a resume.
        self.scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: self._remaining()
        )

    @property
    def version(self) -> int:
        """Of the weights: the number of updates they have seen."""
        return self.stats.updates

    def update(self, batch: Batch, initial_state: tuple[Tensor, ...], publish: Publish) -> bool:
        """Learn from one batch and publish the weights; False once training is finished."""
        with self.lock:
            if self.finished.is_set():
                return False
            before = self.version
            self.step(batch, initial_state)
            if self.version > before:  # else nothing was learnt
                publish(self.model, self.version)
            if self.device.type == "cuda":  # other threads' streams read the weights from here on
                torch.cuda.current_stream(self.device).synchronize()
            if self.stats.step >= self.flags.total_steps:
                self.finished.set()
            return not self.finished.is_set()

    def step(self, batch: Batch, initial_state: tuple[Tensor, ...]) -> None:
        """Learn from one batch."""
        lag = policy_lag(batch, self.version)
        returns, lengths = finished_episodes(batch)
        if self.flags.max_policy_lag is not None:
            dropped = drop_old_rollouts(batch, lag, self.flags.max_policy_lag)
            self.stats.count("dropped_rollouts", dropped)
        num_steps = int((~batch["truncated"][1:]).sum())
        if num_steps == 0:
            # No update, and no new version: it would make the rollouts to come older still.
            self.stats.add_episodes(returns, lengths)
            return
        loss, metrics = compute_loss(self._wrapped, batch, initial_state, self.flags)
        metrics["policy_lag"] = lag.masked_fill(batch["truncated"][1:], 0).sum() / num_steps
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.flags.grad_norm_clipping
        )
        # One transfer for all figures: each .item() would wait for the device.
        figures = torch.stack([v.detach().float() for v in metrics.values()]).tolist()
        reported = dict(zip(metrics, figures, strict=True))
        if not math.isfinite(reported["grad_norm"]):
            raise FloatingPointError(
                f"The gradient's norm must be finite, got {reported['grad_norm']} at "
                f"step {self.stats.step}; lower --learning_rate, clip rewards, or look for "
                "observations and rewards that are not finite."
            )
        reported["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.stats.add_update(num_steps, reported, returns, lengths)
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """All there is to go on from, under the names of TorchBeast's checkpoints."""
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "stats": self.stats.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model_state_dict"])
        self.stats.load_state_dict(state["stats"])
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        # What the flags say now holds, not what they said when the checkpoint was written.
        flags = self.flags
        self.scheduler.base_lrs = [flags.learning_rate]
        for group in self.optimizer.param_groups:
            group.update(
                alpha=flags.alpha,
                momentum=flags.momentum,
                eps=flags.epsilon,
                lr=flags.learning_rate * self._remaining(),
                initial_lr=flags.learning_rate,
            )
            for parameter in group["params"]:
                if flags.momentum > 0:
                    buffer = torch.zeros_like(parameter)
                    self.optimizer.state[parameter].setdefault("momentum_buffer", buffer)

    def _remaining(self) -> float:
        """The part of the training that is still to come."""
        return max(0.0, 1.0 - self.stats.step / self.flags.total_steps)


def make_optimizer(model: nn.Module, flags: Settings) -> torch.optim.RMSprop:
    """RMSProp as the flags say."""
    optimizer = torch.optim.RMSprop(
        model.parameters(),
        lr=flags.learning_rate,
        alpha=flags.alpha,
        momentum=flags.momentum,
        eps=flags.epsilon,
        foreach=True,  # on CPU, too: two thirds of the time
    )
    start_gently(optimizer)
    return optimizer


def policy_lag(batch: Batch, version: int) -> Tensor:
    """By how many updates the weights that acted were behind, [T, B]; 0 where nobody acted."""
    truncated = batch["truncated"][1:]
    if "version" not in batch:
        return torch.zeros_like(truncated, dtype=torch.int64)
    return (version - batch["version"].expand(truncated.shape)).masked_fill(truncated, 0)


def drop_old_rollouts(batch: Batch, lag: Tensor, max_lag: int) -> int:
    """Let nothing be learnt from rollouts with a step that is further behind; returns how many.

    A row that is `truncated` counts for nothing, so that is what all their rows become.
    """
    is_old = (lag > max_lag).any(dim=0)  # [B]
    batch["truncated"] = batch["truncated"] | is_old
    return int(is_old.sum())


def start_gently(optimizer: torch.optim.RMSprop) -> None:
    """Begin RMSProp's mean of squares at 1, as the implementation behind the paper's settings does.

    PyTorch begins at 0, which makes the first steps ten times the learning rate for every weight:
    enough to switch off all units of a layer for good.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {"step": torch.tensor(0.0), "square_avg": torch.ones_like(parameter)}
            if group["momentum"] > 0:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            optimizer.state[parameter] = state


def compute_loss(
    model: nn.Module, batch: Batch, initial_state: tuple[Tensor, ...], flags: Settings
) -> tuple[Tensor, dict[str, Tensor]]:
    """IMPALA's loss of a batch and what to report about it."""
    with autocast(batch["done"].device, flags.autocast):
        output, _ = model(batch, initial_state)
    output = as_output(output)
    output = {name: output[name].float() for name in ("policy_logits", "baseline")}
    T = len(batch["reward"]) - 1
    # Transition t leads from row t to row t + 1: what it brought stands on row t + 1.
    rewards = losses.clip_reward(batch["reward"][1:], flags.reward_clipping)
    discounts = flags.discounting * (~batch["done"][1:]).float()
    mask = ~batch["truncated"][1:]
    logits, values = output["policy_logits"][:T], output["baseline"][:T]
    actions = batch["action"][:T]

    targets = vtrace.from_logits(
        behavior_policy_logits=batch["policy_logits"][:T],
        target_policy_logits=logits,
        actions=actions,
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
    pg_loss = losses.compute_policy_gradient_loss(logits, actions, targets.pg_advantages)
    baseline_loss = flags.baseline_cost * losses.compute_baseline_loss(targets.vs - values)
    entropy_loss = flags.entropy_cost * losses.compute_entropy_loss(logits, mask)
    total_loss = pg_loss + baseline_loss + entropy_loss

    clipped = targets.log_rhos[mask] > math.log(flags.clip_rho_threshold)
    metrics = {
        "total_loss": total_loss,
        "pg_loss": pg_loss,
        "baseline_loss": baseline_loss,
        "entropy_loss": entropy_loss,
        "clipped_rho_fraction": clipped.float().mean(),
        "explained_variance": explained_variance(values.detach()[mask], targets.vs[mask]),
    }
    return total_loss, metrics


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Mixed precision for a forward pass, if `dtype` is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than a constant."""
    return 1.0 - (targets - values).var(correction=0) / targets.var(correction=0)


def finished_episodes(batch: Batch) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that ended in this batch.

    Row 0 was the last row of the rollout before and has been counted there.
    """
    done, episode_step = batch["done"][1:], batch["episode_step"][1:]
    over = done & (episode_step > 0)  # not the very first row, not a lost life
    return batch["episode_return"][1:][over].tolist(), episode_step[over].tolist()
