"""One update of IMPALA, shared by both beasts: a batch of rollouts in, new weights out.

Shapes: T is unroll_length, B the batch size; a batch has T+1 rows, the last is for bootstrapping.
"""

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from libtorchbeast.supervisor import RepeatFilter
from torchbeast.core.distributions import Distribution
from torchbeast.core.losses import (
    Batch,
    Targets,
    clip_rewards,
    compute_loss,
    find_targets,
    flatten_steps,
    run_model,
)
from torchbeast.core.nonfinite import describe_rollouts, find_nonfinite, pick_columns
from torchbeast.core.optimizers import load_optimizer, make_optimizer
from torchbeast.core.reward_scale import RewardScale
from torchbeast.core.running_moments import MAX_DEVIATIONS
from torchbeast.core.settings import Settings
from torchbeast.core.stats import RunningStats

Publish = Callable[[nn.Module, int], None]
"""Gives the agent a model's weights and their version."""

MAX_SKIPPED_UPDATES = 100  # in a row; more of them will not help

logger = logging.getLogger("torchbeast")


class NothingFinite(FloatingPointError):
    """The gradient is not finite for update after update."""


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
        distribution: Distribution | None = None,
    ) -> None:
        """`lock` and `stats` may be shared with other learners of the same model; `distribution` is
        what `policy_logits` are the parameters of, None: a softmax policy's."""
        self.model = model.to(device)
        if flags.compile:
            self.model.compile()
        self._wrapped = wrap(self.model)
        self.flags = flags
        self.device = device
        self.lock = lock or threading.Lock()
        self.finished = threading.Event()
        self.stats = stats or RunningStats()
        self.distribution = distribution
        self.name_source: Callable[[int], str] = "environment {}".format
        """The environment behind a number in a batch's `source`, for people."""
        self._skipped_in_a_row = 0
        self._last_culprits = ""
        self._repeats = RepeatFilter()
        self._sees_single_rows = getattr(model, "sees_single_rows", False)
        self._reward_scale = (
            RewardScale(flags.discounting).to(device) if flags.normalize_rewards else None
        )
        self.optimizer = optimizer or make_optimizer(self.model, flags)
        # By steps taken, not by updates: exact whatever the batches held, also after a resume.
        self.scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: self._rate_factor()
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
        """Learn from one batch; not from rollouts that make the gradient infinite or NaN.

        Without anything to learn from there is no update and no new version, which would make the
        rollouts to come older still.
        """
        lag = policy_lag(batch, self.version)
        self.stats.add_episodes(*finished_episodes(batch))
        if self.flags.max_policy_lag is not None:
            dropped = drop_old_rollouts(batch, lag, self.flags.max_policy_lag)
            self.stats.count("dropped_rollouts", dropped)
        if batch["truncated"][1:].all():
            return
        restore = self._remember()
        figures = self._learn_from(batch, initial_state, lag)
        if not math.isfinite(figures[-1]["grad_norm"]):
            restore()
            culprits = self._find_culprits(batch, initial_state)
            restore()
            kept = [i for i in range(lag.shape[1]) if i not in culprits]
            batch, initial_state, lag = pick_columns((batch, initial_state, lag), kept)
            figures = []
            if culprits and not batch["truncated"][1:].all():
                figures = self._learn_from(batch, initial_state, lag)
        if not figures or not math.isfinite(figures[-1]["grad_norm"]):
            restore()
            self._skip()
            return
        self._skipped_in_a_row = 0
        means = {name: math.fsum(m[name] for m in figures) / len(figures) for name in figures[0]}
        self._report_outliers(int(means.pop("outliers")))
        means["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.stats.add_update(int((~batch["truncated"][1:]).sum()), means)
        self.scheduler.step()

    def _learn_from(
        self, batch: Batch, initial_state: tuple[Tensor, ...], lag: Tensor
    ) -> list[dict[str, float]]:
        """All passes over a batch; returns the figures of each step of the optimizer.

        Ends at the first gradient that is not finite, with which no step is made.
        """
        outliers = self._observe(batch)
        mean_lag = float(lag[~batch["truncated"][1:]].float().mean())
        rewards = self._scale_rewards(batch)
        goals: Targets | Tensor = rewards
        if self.flags.clip_ratio is not None:
            with torch.no_grad():
                output, _ = run_model(self.model, batch, initial_state, self.flags)
                goals = find_targets(output, batch, self.flags, rewards, self.distribution)
            can_mix_steps = self._sees_single_rows and not initial_state
            if can_mix_steps and self.flags.num_minibatches > 1:
                batch, goals = flatten_steps(batch, goals)
        rollouts = (batch, initial_state, goals)
        figures = []
        for columns in self._draw_minibatches(batch["done"].shape[1]):
            part = rollouts if columns is None else pick_columns(rollouts, columns)
            metrics = self._find_gradient(*part)
            if metrics is None:
                continue
            figures.append({**metrics, "outliers": outliers, "policy_lag": mean_lag})
            if not math.isfinite(metrics["grad_norm"]):
                break
            self.optimizer.step()
        return figures

    def _draw_minibatches(self, num_columns: int) -> Iterator[Tensor | None]:
        """The columns of each step of the optimizer; None: all of them.

        Every pass deals them out at random.
        """
        num_parts = min(self.flags.num_minibatches, num_columns)
        for _ in range(self.flags.num_passes):
            if num_parts == 1:
                yield None
                continue
            order = torch.randperm(num_columns).to(self.device)
            yield from (order[i::num_parts] for i in range(num_parts))

    def _observe(self, batch: Batch) -> int:
        """Take a batch into the running statistics; returns how many numbers were out of reach."""
        truncated = batch["truncated"][1:]
        outliers = torch.zeros((), device=truncated.device)
        observe_frames = getattr(self.model, "observe_frames", None)
        if observe_frames is not None:
            outliers += observe_frames(batch["frame"], ~truncated)
        if self._reward_scale is not None:
            outliers += self._reward_scale.observe(clip_rewards(batch, self.flags), batch)
        return int(outliers)

    def _find_gradient(
        self, batch: Batch, initial_state: tuple[Tensor, ...], goals: Targets | Tensor
    ) -> dict[str, float] | None:
        """The gradient of a batch or a part of it, clipped; returns what to report about it.

        `goals` are targets, or the rewards to find them from. None: there is nothing to learn.
        """
        targets = goals if isinstance(goals, Targets) else None
        rewards = None if isinstance(goals, Targets) else goals
        mask = ~batch["truncated"][1:] if targets is None else targets.mask
        if not mask.any():
            return None
        loss, metrics = compute_loss(
            self._wrapped,
            batch,
            initial_state,
            self.flags,
            rewards,
            self.distribution,
            targets,
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.flags.grad_norm_clipping
        )
        # One transfer for all figures: each .item() would wait for the device.
        figures = torch.stack([v.detach().float() for v in metrics.values()]).tolist()
        return dict(zip(metrics, figures, strict=True))

    def _scale_rewards(self, batch: Batch) -> Tensor:
        """Those to learn from, [T, B]: clipped and scaled as the flags say."""
        rewards = clip_rewards(batch, self.flags)
        return rewards if self._reward_scale is None else self._reward_scale.scale(rewards)

    def _find_culprits(self, batch: Batch, initial_state: tuple[Tensor, ...]) -> list[int]:
        """Log and count the rollouts whose gradient is not finite.

        By the statistics of observations and rewards from before, which no rollout has spoilt.
        """

        def loss_of(batch: Batch, initial_state: tuple[Tensor, ...]) -> Tensor:
            rewards = self._scale_rewards(batch)
            return compute_loss(
                self.model, batch, initial_state, self.flags, rewards, self.distribution
            )[0]

        culprits = find_nonfinite(self.model, loss_of, batch, initial_state)
        self.stats.count("nonfinite_rollouts", len(culprits))
        self._last_culprits = (
            describe_rollouts(batch, culprits, self.version, self.name_source)
            if culprits
            else "no rollout of the batch alone"
        )
        text = self._repeats.take("The gradient of these rollouts is not finite; they are left out")
        if text is not None:
            logger.warning("%s: %s.", text, self._last_culprits)
        return culprits

    def _report_outliers(self, number: int) -> None:
        if number == 0:
            return
        self.stats.count("outliers", number)
        text = self._repeats.take(
            f"Observations or rewards are more than {MAX_DEVIATIONS:.0f} deviations from their "
            "mean; their running statistics take them for that far away"
        )
        if text is not None:
            logger.warning("%s: %d numbers of the last batch.", text, number)

    def _remember(self) -> Callable[[], None]:
        """Returns a function that puts back what an update changes before it may fail.

        Forward passes change running means; of several steps of the optimizer the first may have
        been made when a later one fails.
        """
        scale, flags = self._reward_scale, self.flags
        modules = [self.model] if scale is None else [self.model, scale]
        tensors = [b for module in modules for b in module.buffers()]
        optimizer_state = None
        if flags.num_passes * flags.num_minibatches > 1:
            tensors += list(self.model.parameters())
            optimizer_state = copy.deepcopy(self.optimizer.state_dict())
        saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
        returns = scale.snapshot() if scale is not None else {}

        @torch.no_grad()
        def restore() -> None:
            for tensor, value in saved:
                tensor.copy_(value)
            if optimizer_state is not None:
                self.optimizer.load_state_dict(copy.deepcopy(optimizer_state))
            if scale is not None:
                scale.restore(returns)

        return restore

    def _skip(self) -> None:
        """Count an update that cannot be made; NothingFinite if it goes on like this."""
        self.stats.count("skipped_updates", 1)
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise NothingFinite(
                f"The gradient must be finite, and was not for {self._skipped_in_a_row} updates in "
                f"a row at step {self.stats.step}; the last time because of "
                f"{self._last_culprits}. Lower --learning_rate, clip rewards, or look at what "
                "these environments send."
            )

    def state_dict(self) -> dict[str, Any]:
        """All there is to go on from, under the names of TorchBeast's checkpoints."""
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer": self.flags.optimizer,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "stats": self.stats.state_dict(),
            **({"reward_scale": scale.state_dict()} if (scale := self._reward_scale) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; another optimizer than it was begins with a state of its own."""
        self.model.load_state_dict(state["model_state_dict"])
        self.stats.load_state_dict(state["stats"])
        if self._reward_scale is not None and "reward_scale" in state:
            self._reward_scale.load_state_dict(state["reward_scale"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        flags = self.flags
        # What the flags say now holds, not what they said when the checkpoint was written.
        self.scheduler.base_lrs = [flags.learning_rate]
        optimizer_state = state["optimizer_state_dict"]
        if (before := state.get("optimizer", "rmsprop")) != flags.optimizer:
            logger.warning(
                "The checkpoint was written with --optimizer %s; %s begins with a new state.",
                before, flags.optimizer,
            )  # fmt: skip
            optimizer_state = self.optimizer.state_dict()
        elif _num_parameters(optimizer_state) != _num_parameters(self.optimizer.state_dict()):
            logger.warning(
                "The checkpoint is of a model with %d parameters, now there are %d; the optimizer "
                "begins with a new state.",
                _num_parameters(optimizer_state), _num_parameters(self.optimizer.state_dict()),
            )  # fmt: skip
            optimizer_state = self.optimizer.state_dict()
        lr = flags.learning_rate * self._rate_factor()
        load_optimizer(self.optimizer, optimizer_state, flags, lr)

    def _rate_factor(self) -> float:
        """What the learning rate is multiplied by: the part of the training still to come."""
        if self.flags.schedule == "constant":
            return 1.0
        return max(0.0, 1.0 - self.stats.step / self.flags.total_steps)


def _num_parameters(optimizer_state: dict[str, Any]) -> int:
    return sum(len(group["params"]) for group in optimizer_state["param_groups"])


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


def finished_episodes(batch: Batch) -> tuple[list[float], list[int]]:
    """Returns and lengths of the episodes that ended in this batch.

    Row 0 was the last row of the rollout before and has been counted there.
    """
    done, episode_step = batch["done"][1:], batch["episode_step"][1:]
    over = done & (episode_step > 0)  # not the very first row, not a lost life
    return batch["episode_return"][1:][over].tolist(), episode_step[over].tolist()
