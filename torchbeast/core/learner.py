"""One update of IMPALA, shared by both beasts: a batch of rollouts in, new weights out.

Shapes: T is unroll_length, B the batch size; a batch has T+1 rows, the last is for bootstrapping.
"""

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from libtorchbeast.log_repeats import RepeatFilter
from torchbeast.core.distributions import Distribution
from torchbeast.core.losses import (
    Batch,
    Loss,
    Targets,
    clip_rewards,
    compute_loss,
    find_targets,
    flatten_steps,
    normalize_nothing,
    run_model,
)
from torchbeast.core.minibatches import deal_out
from torchbeast.core.nonfinite import describe_rollouts, find_nonfinite
from torchbeast.core.optimizers import load_optimizer, make_optimizer
from torchbeast.core.precision import wants_bf16
from torchbeast.core.rank_rounds import Decision, Rounds
from torchbeast.core.rank_stats import mean_figures, merge_figures
from torchbeast.core.ranks import ALONE, Ranks
from torchbeast.core.revert_update import Undo, even_out
from torchbeast.core.reward_scale import RewardScale
from torchbeast.core.rollout_batch import (
    Rollouts,
    drop_old_rollouts,
    finished_episodes,
    pick_columns,
    policy_lag,
)
from torchbeast.core.running_moments import MAX_DEVIATIONS
from torchbeast.core.settings import Settings
from torchbeast.core.stats import RunningStats

Publish = Callable[[nn.Module, int], None]
"""Publishes a model's weights and their version to the agent."""

MAX_SKIPPED_UPDATES = 100  # in a row; then the run ends

logger = logging.getLogger("torchbeast")


class NothingFinite(FloatingPointError):
    """The gradient was not finite for MAX_SKIPPED_UPDATES updates in a row."""


class Learner:
    """A model, its optimizer and statistics. Any thread may call `update`; the rest needs `lock`.

    `finished` is set after `total_steps`, or to end the run; then there are no more updates. With
    several `ranks`, each makes the same updates, with the rollouts of all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        flags: Settings,
        device: torch.device,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        ranks: Ranks = ALONE,
        lock: "threading.Lock | None" = None,
        stats: RunningStats | None = None,
        distribution: Distribution | None = None,
    ) -> None:
        """`lock` and `stats` may be shared with other learners of the same model; `distribution` is
        that of the actions, whose parameters are `policy_logits`; None: a softmax policy's."""
        self.model = model.to(device)
        if flags.compile:
            self.model.compile()
        self.ranks = ranks
        self.rounds = Rounds(ranks)
        self._loss = ranks.wrap(Loss(self.model, flags, distribution, ranks), device)
        self.flags = flags
        self.device = device
        self.lock = lock or threading.Lock()
        self.finished = threading.Event()
        self.stats = stats or RunningStats()
        self.distribution = distribution
        self.name_source: Callable[[int], str] = "environment {}".format
        """The environment with a number in a batch's `source`, in words."""
        self._skipped_in_a_row = 0
        self._last_nonfinite = ""
        self._outliers = 0  # numbers of the current batch that the running statistics clipped
        self._repeats = RepeatFilter()
        self._sees_single_rows = getattr(model, "sees_single_rows", False)
        self._reward_scale = (
            RewardScale(flags.discounting).to(device) if flags.normalize_rewards else None
        )
        self.optimizer = optimizer or make_optimizer(self.model, flags)
        # By environment steps, not by updates: exact for any sizes of batches, also after a resume.
        self.scheduler = scheduler or torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda _: self._rate_factor()
        )

    @property
    def version(self) -> int:
        """The version of the weights: the number of updates so far."""
        return self.stats.updates

    def update(
        self, batch: Batch | None, initial_state: tuple[Tensor, ...], publish: Publish
    ) -> bool:
        """Learn from one batch and publish the weights; False once training is finished.

        With several ranks, an update learns from the batches of all; None: this rank has no batch,
        and takes part in an update with those of the others, if they have any.
        """
        with self.lock:
            decision = Decision.WAIT
            while decision is Decision.WAIT:
                if self.finished.is_set():
                    return False
                decision = self.rounds.meet(has_batch=batch is not None)
                if decision is Decision.WAIT and batch is None:
                    return True
            if decision is Decision.STOP:
                self.finished.set()
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

    def step(self, batch: Batch | None, initial_state: tuple[Tensor, ...] = ()) -> None:
        """Learn from one batch, without rollouts that make the gradient infinite or NaN.

        If nothing is left to learn from, there is no update and no new version, which would make
        later rollouts even older. All ranks decide alike, by what all of them know.
        """
        mine = None if batch is None else self._take_in(batch, initial_state)
        undo = Undo(self.model, self._reward_scale, self.optimizer, self.flags)
        try:
            steps = self._learn_from(mine)
            was_finite = steps is not None
            if not was_finite:
                undo()
                nonfinite = [] if mine is None else self._find_nonfinite(mine)
                undo()
                mine = None if mine is None else mine.without(nonfinite)
                if self.ranks.sum(torch.tensor(len(nonfinite))) > 0:
                    steps = self._learn_from(mine)
            if not steps:
                undo()
                if not was_finite:
                    self._skip()
        except BaseException:  # such as the end of another rank, half-way through the passes
            undo()
            raise
        self._report(mine, steps or [])
        if steps:
            self._skipped_in_a_row = 0
            even_out(undo.changed_buffers(self.ranks), mine, self.ranks)
            self.scheduler.step()

    def _take_in(self, batch: Batch, initial_state: tuple[Tensor, ...]) -> Rollouts:
        """Count the episodes that ended, and mask rollouts that are too old."""
        lag = policy_lag(batch, self.version)
        self.stats.add_episodes(*finished_episodes(batch))
        if self.flags.max_policy_lag is not None:
            dropped = drop_old_rollouts(batch, lag, self.flags.max_policy_lag)
            self.stats.count("dropped_rollouts", dropped)
        return Rollouts(batch, initial_state, lag)

    def _learn_from(self, mine: Rollouts | None) -> list[dict[str, float]] | None:
        """Make all passes over the batch; returns the figures of each step of the optimizer.

        Returns None at the first gradient that is not finite, without making a step with it, and
        an empty list if no rank has steps to learn from.
        """
        if int(self.ranks.sum(torch.tensor(0 if mine is None else mine.num_steps))) == 0:
            return []
        self._outliers = self._observe(mine)
        batch, initial_state, goals = self._set_goals(mine)
        mask = goals.mask if isinstance(goals, Targets) else None if mine is None else mine.mask
        steps = []
        for columns, num_steps in deal_out(mask, self.flags, self.ranks):
            part: Any = (None,)
            if num_steps > 0:
                part = batch, initial_state, goals
                part = part if columns is None else pick_columns(part, columns)
            metrics = self._find_gradient(*part)
            if not math.isfinite(metrics["grad_norm"]):
                return None
            steps.append({**metrics, "weight": num_steps})
            self.optimizer.step()
        return steps

    def _set_goals(
        self, mine: Rollouts | None
    ) -> tuple[Batch | None, tuple[Tensor, ...], Targets | Tensor | None]:
        """The batch, its state, and what all passes learn from: targets, or else rewards."""
        finds_targets = self.flags.clip_ratio is not None
        if mine is None:
            if finds_targets and self.flags.normalize_advantages:
                normalize_nothing(self.device, self.ranks)
            return None, (), None
        batch, initial_state, _ = mine
        rewards = self._scale_rewards(batch)
        if not finds_targets:
            return batch, initial_state, rewards
        with torch.no_grad():
            batch = self._prepare_frames(batch)
            output, _ = run_model(self.model, batch, initial_state, self.flags)
            goals = find_targets(output, batch, self.flags, rewards, self.distribution, self.ranks)
        can_mix_steps = self._sees_single_rows and not initial_state
        if can_mix_steps and self.flags.num_minibatches > 1:
            batch, goals = flatten_steps(batch, goals)
        return batch, initial_state, goals

    def _prepare_frames(self, batch: Batch) -> Batch:
        """The batch with frames prepared for the nets once for all passes, if the model can."""
        prepare: Any = getattr(self.model, "prepare_frames", None)
        if prepare is None or not wants_bf16(self.device, self.flags.autocast):
            return batch
        return {**batch, "frame": prepare(batch["frame"])}

    def _observe(self, mine: Rollouts | None) -> int:
        """Update the running statistics with a batch; returns how many numbers were clipped."""
        outliers: Tensor | float = 0.0
        observe_frames: Any = getattr(self.model, "observe_frames", None)
        if observe_frames is not None:
            frame, mask = (None, None) if mine is None else (mine.batch["frame"], mine.mask)
            outliers = observe_frames(frame, mask, self.ranks)
        if self._reward_scale is not None and mine is not None:
            rewards = clip_rewards(mine.batch, self.flags)
            outliers = outliers + self._reward_scale.observe(rewards, mine.batch, self.ranks)
        elif self._reward_scale is not None:
            self._reward_scale.observe_nothing(self.ranks)
        return int(outliers)

    def _find_gradient(
        self,
        batch: Batch | None,
        initial_state: tuple[Tensor, ...] = (),
        goals: Targets | Tensor | None = None,
    ) -> dict[str, float]:
        """Compute and clip the gradient of a batch or minibatch; returns the figures to report.

        `goals` are targets, or the rewards to find them from. Without a batch, only other ranks
        have steps in the minibatch.
        """
        targets = goals if isinstance(goals, Targets) else None
        rewards = None if isinstance(goals, Targets) else goals
        loss, metrics = self._loss(batch, initial_state, rewards, targets)
        self.optimizer.zero_grad(set_to_none=True)
        self.ranks.backward(loss)
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(
            self.model.parameters(), self.flags.grad_norm_clipping
        )
        # One transfer for all figures: each .item() would wait for the device.
        figures = torch.stack([v.detach().float() for v in metrics.values()]).tolist()
        return dict(zip(metrics, figures, strict=True))

    def _report(self, mine: Rollouts | None, steps: list[dict[str, float]]) -> None:
        """Exchange the figures of an update with the other ranks, and count it if there was one."""
        own = mean_figures(steps)
        num_steps = mine.num_steps if mine is not None and steps else 0
        if mine is not None and num_steps > 0:
            own["policy_lag"] = float(mine.lag[mine.mask].float().mean())
            self._report_outliers(self._outliers)
        message = {"steps": num_steps, "figures": own, "news": self.stats.take_news()}
        messages = self.ranks.exchange(message)
        self.stats.add_news([message["news"] for message in messages])
        if not steps:
            return
        counts = [message["steps"] for message in messages]
        figures = merge_figures([message["figures"] for message in messages], counts)
        figures["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.ranks.size > 1:
            figures["num_learners"] = sum(number > 0 for number in counts)
        self.stats.add_update(sum(counts), figures)

    def _scale_rewards(self, batch: Batch) -> Tensor:
        """The rewards to learn from, [T, B]: clipped and scaled as the flags say."""
        rewards = clip_rewards(batch, self.flags)
        return rewards if self._reward_scale is None else self._reward_scale.scale(rewards)

    def _find_nonfinite(self, mine: Rollouts) -> list[int]:
        """Find, log and count the rollouts whose gradient is not finite.

        The running statistics are those from before the batch, which its rollouts cannot spoil.
        """
        batch = mine.batch

        def loss_of(batch: Batch, initial_state: tuple[Tensor, ...]) -> Tensor:
            rewards = self._scale_rewards(batch)
            return compute_loss(
                self.model, batch, initial_state, self.flags, rewards, self.distribution
            )[0]

        nonfinite = find_nonfinite(self.model, loss_of, batch, mine.initial_state)
        self.stats.count("nonfinite_rollouts", len(nonfinite))
        self._last_nonfinite = (
            describe_rollouts(batch, nonfinite, self.version, self.name_source)
            if nonfinite
            else "no rollout of the batch alone"
        )
        text = self._repeats.take("The gradient of these rollouts is not finite; they are left out")
        if text is not None:
            logger.warning("%s: %s.", text, self._last_nonfinite)
        return nonfinite

    def _report_outliers(self, number: int) -> None:
        if number == 0:
            return
        self.stats.count("outliers", number)
        text = self._repeats.take(
            f"Observations or rewards are more than {MAX_DEVIATIONS:.0f} deviations from their "
            "mean; the running statistics clip them to that distance"
        )
        if text is not None:
            logger.warning("%s: %d numbers of the last batch.", text, number)

    def _skip(self) -> None:
        """Count an update that cannot be made; NothingFinite if there are too many in a row.

        With clients there is only an error in the log: nothing that a client sends ends a run.
        """
        self.stats.count("skipped_updates", int(self.ranks.rank == 0))  # all ranks skip it
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row < MAX_SKIPPED_UPDATES:
            return
        text = (
            f"The gradient must be finite, and was not for {self._skipped_in_a_row} updates in a "
            f"row at step {self.stats.step}; the last time because of {self._last_nonfinite}. "
            "Lower --learning_rate, clip rewards, or look at what these environments send."
        )
        if not self.rounds.any_clients:
            raise NothingFinite(text)
        shown = self._repeats.take(text, key="nothing finite")
        if shown is not None:
            logger.error("%s The run goes on, as it may be a client's doing.", shown)

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs, under the names of TorchBeast's checkpoints."""
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer": self.flags.optimizer,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "stats": self.stats.state_dict(),
            **({"reward_scale": scale.state_dict()} if (scale := self._reward_scale) else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`; an optimizer that is not the saved one gets a new state."""
        self.model.load_state_dict(state["model_state_dict"])
        self.stats.load_state_dict(state["stats"])
        if self._reward_scale is not None and "reward_scale" in state:
            self._reward_scale.load_state_dict(state["reward_scale"])
        self.scheduler.load_state_dict(state["scheduler_state_dict"])
        flags = self.flags
        # The current flags hold, not those at the time when the checkpoint was written.
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
        """The factor of the learning rate: with a linear schedule, the part of training to come."""
        if self.flags.schedule == "constant":
            return 1.0
        return max(0.0, 1.0 - self.stats.step / self.flags.total_steps)


def _num_parameters(optimizer_state: dict[str, Any]) -> int:
    return sum(len(group["params"]) for group in optimizer_state["param_groups"])
