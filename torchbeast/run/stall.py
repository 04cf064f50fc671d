"""Why a run makes no step, for people: an update, the agent, environments, or what batches held."""

import time
from collections.abc import Callable

from torchbeast.core.stats import RunningStats

MAX_NAMED = 4  # of those who are late
BUSY = 0.5  # part of the time without a step from which it is the agent's


class Stall:
    """Looks at the run now and then (`poll`), and explains a time without steps when asked."""

    def __init__(
        self,
        stats: RunningStats,
        late: Callable[[], list[str]],
        count_steps: Callable[[], int],
        count_rollouts: Callable[[], tuple[int, int]],
        who: str = "environments",
    ) -> None:
        """`late()` names those that do nothing for a while; `count_steps()` are the environments',
        learnt from or not; `count_rollouts()` are those that wait, and those in an update. `who`
        steps the environments.
        """
        self._stats = stats
        self._late = late
        self._count_steps = count_steps
        self._count_rollouts = count_rollouts
        self._who = who
        self._begin()

    def poll(self) -> None:
        """Note that a step has come. Call it a few times a second."""
        if self._stats.step != self._step:
            self._begin()

    def explain(self, seconds: float) -> str:
        """Who has been waited for in these seconds without a step; ends with a full stop."""
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
        """A step has come: the next time without one begins."""
        self._step = self._stats.step
        self._begun_at = time.monotonic()
        self._steps_before = self._count_steps()
        self._agent_s_before = self._stats.work["inference"].mean_s
        learner = self._stats.work["learner"]
        # The batch that has brought the step is still being learnt from, perhaps.
        self._batches_before = learner.num_done + learner.num_running
