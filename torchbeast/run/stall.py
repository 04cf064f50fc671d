"""Explains why a run makes no steps: a long update, the agent, environments, or batches that are
not learnt from."""

import time
from collections.abc import Callable

from torchbeast.core.stats import RunningStats

MAX_NAMED = 4  # late processes or connections in one message
BUSY = 0.5  # part of the time without a step that the agent computes, from which it is the cause


class Stall:
    """Watches a run's steps (`poll`), and explains a time without any (`explain`)."""

    def __init__(
        self,
        stats: RunningStats,
        late: Callable[[], list[str]],
        count_steps: Callable[[], int],
        count_rollouts: Callable[[], tuple[int, int]],
        who: str = "environments",
    ) -> None:
        """`late()` names processes and connections that do nothing for a while; `count_steps()`
        counts environment steps, learnt from or not; `count_rollouts()` returns how many rollouts
        wait, and how many an update needs. `who` is a word for what steps the environments.
        """
        self._stats = stats
        self._late = late
        self._count_steps = count_steps
        self._count_rollouts = count_rollouts
        self._who = who
        self._begin()

    def poll(self) -> None:
        """Note whether a step has been made. Call it a few times a second."""
        if self._stats.step != self._step:
            self._begin()

    def explain(self, seconds: float) -> str:
        """What was waited for in these seconds without a step; ends with a full stop."""
        learner, agent = self._stats.work["learner"], self._stats.work["inference"]
        update_s = min(learner.running_s, seconds)
        if update_s >= seconds / 2:
            return f"an update has been under way for {update_s:.0f} s."
        if late := self._late():
            more = [f"{len(late) - MAX_NAMED} more"] if len(late) > MAX_NAMED else []
            return f"waiting for {', '.join([*late[:MAX_NAMED], *more])}."
        if learner.num_done > self._batches_before:
            number = learner.num_done - self._batches_before
            return (
                f"nothing could be learnt from the last batches, {number} so far; see "
                "dropped_rollouts and skipped_updates."
            )
        num_steps = self._count_steps() - self._steps_before
        passed_s = time.monotonic() - self._begun_at
        share = min(1.0, (agent.mean_s - self._agent_s_before) / max(passed_s, 1e-9))
        if share >= BUSY:
            return (
                f"waiting for the agent, which computes actions for {share:.0%} of the time; "
                f"{num_steps:,} steps were played meanwhile."
            )
        here, needed = self._count_rollouts()
        return (
            f"waiting for {self._who}, which do not hang: {num_steps:,} steps were played "
            f"meanwhile, and {min(here, needed)} of {needed} rollouts are there for an update."
        )

    def _begin(self) -> None:
        """A step has been made: a new time without steps begins."""
        self._step = self._stats.step
        self._begun_at = time.monotonic()
        self._steps_before = self._count_steps()
        self._agent_s_before = self._stats.work["inference"].mean_s
        learner = self._stats.work["learner"]
        # The update that has made the step may still be running.
        self._batches_before = learner.num_done + learner.num_running
