"""Where the time goes between environments and learner: figures for the logs, and a picture."""

import logging
import time
from pathlib import Path
from typing import Any

import torch

from libtorchbeast.actor_pool import ActorPool
from torchbeast.core.stats import RunningStats

logger = logging.getLogger("torchbeast")

RECORD_S = 3.0


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

    def poll(self) -> None:
        counts = self._pool.counts()
        new = {name: count - self._before[name] for name, count in counts.items()}
        self._before = counts
        waits = {
            f"actors_wait_for_{who}": new[f"seconds_for_{who}"]
            for who in ("environments", "agent", "learner")
        }
        total = sum(waits.values())  # 0 if no wait has ended since the last look
        self._stats.observe(
            {
                "learner_queue_size": self._learner_queue.size(),
                "inference_queue_size": self._batcher.size(),
                "num_actors": self._pool.num_actors(),
                **{name: seconds / total for name, seconds in waits.items() if total > 0},
            }
        )
        self._stats.count("padded_rollouts", int(new["padded_rollouts"]))


class Trace:
    """What all threads do for a few seconds from the first call of `record` on, as a picture for
    chrome://tracing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: torch.profiler.profile | None = None
        self._ends_at: float | None = None

    def record(self) -> None:
        """Call it a few times a second; the same thread must start and stop a profile."""
        if self._ends_at is None:
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profile = torch.profiler.profile(experimental_config=all_threads)
            self._profile.start()
            self._ends_at = time.monotonic() + RECORD_S
        elif time.monotonic() > self._ends_at:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            logger.info("A trace is in %s.", self._path)
