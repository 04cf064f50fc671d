"""Where time is spent between environments and learner: figures for the logs, and a trace."""

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
    """Adds to the statistics: sizes of queues, and what actors wait for."""

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
        total = sum(waits.values())  # 0 if no wait has ended since the last call
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
    """Records all threads for RECORD_S from the first `record` on, in a file for
    chrome://tracing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: torch.profiler.profile | None = None
        self._ends_at: float | None = None

    def record(self) -> None:
        """Start or end the recording. Call it a few times a second, always from one thread."""
        if self._ends_at is None:
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profile = torch.profiler.profile(experimental_config=all_threads)
            self._profile.start()
            self._ends_at = time.monotonic() + RECORD_S
        elif time.monotonic() > self._ends_at:
            self.close()

    def close(self) -> None:
        """Write what has been recorded so far, if anything."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            logger.info("A trace is in %s.", self._path)
