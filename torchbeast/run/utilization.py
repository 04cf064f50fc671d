"""How busy the stages between environments and learner are, for the logs."""

from typing import Any

from libtorchbeast.actor_pool import ActorPool
from torchbeast.core.stats import RunningStats


class Stages:
    """How the stages between environments and learner fare, for the logs."""

    def __init__(
        self, stats: RunningStats, pool: ActorPool, learner_queue: Any, batcher: Any
    ) -> None:
        self._stats = stats
        self._pool = pool
        self._learner_queue = learner_queue
        self._batcher = batcher
        self._before = pool.counts()
        self._padded = 0

    def poll(self) -> None:
        counts = self._pool.counts()
        waits = {
            f"actors_wait_for_{who}": counts[f"seconds_for_{who}"]
            - self._before[f"seconds_for_{who}"]
            for who in ("environments", "agent", "learner")
        }
        self._before = counts
        total = sum(waits.values())  # 0 if no wait has ended since the last look
        self._stats.observe(
            {
                "learner_queue_size": self._learner_queue.size(),
                "inference_queue_size": self._batcher.size(),
                "num_actors": self._pool.num_actors(),
                **{name: seconds / total for name, seconds in waits.items() if total > 0},
            }
        )
        padded = int(counts["padded_rollouts"])
        self._stats.count("padded_rollouts", padded - self._padded)
        self._padded = padded
