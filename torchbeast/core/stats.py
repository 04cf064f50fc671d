"""A run's statistics, which are shown, logged and kept in checkpoints."""

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from libtorchbeast.episode_info import MAX_NAMES, InfoSums
from torchbeast.core.work_log import WorkLog

EPISODE_WINDOW = 100


class _Count:
    """An attribute whose value is stored in the object's dict `counts`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Any, owner: type) -> int:
        return stats.counts.get(self._name, 0)

    def __set__(self, stats: Any, number: int) -> None:
        stats.counts[self._name] = number


class RunningStats:
    """Counts steps and episodes exactly; averages the figures of updates between two logs.

    Learner threads write, the main thread reads.
    """

    step = _Count()
    updates = _Count()
    episodes = _Count()

    def __init__(self, counts: dict[str, Any] | None = None) -> None:
        """`counts` may be shared by several learners, if only one at a time makes an update."""
        self.counts = {} if counts is None else counts
        self.work = {kind: WorkLog() for kind in ("learner", "inference")}
        """How long this process's threads work, by kind of thread."""
        self._lock = threading.Lock()
        self._last_update: dict[str, float] = {}
        self._returns: deque[float] = deque(maxlen=EPISODE_WINDOW)
        self._lengths: deque[int] = deque(maxlen=EPISODE_WINDOW)
        self._infos: dict[str, deque[tuple[float, int]]] = {}
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._totals: dict[str, int] = {}

    def add_update(self, num_steps: int, metrics: dict[str, float]) -> None:
        """Count one update with its environment steps and figures."""
        with self._lock:
            self.step += num_steps
            self.updates += 1
            self._add(metrics)
            self._last_update = metrics

    def add_episodes(self, returns: Iterable[float], lengths: Iterable[int]) -> None:
        """Count the episodes that ended in a batch, whether it is learnt from or not."""
        with self._lock:
            for episode_return, length in zip(returns, lengths, strict=True):
                self.episodes += 1
                self._returns.append(episode_return)
                self._lengths.append(length)

    def add_info(self, sums: InfoSums) -> None:
        """Add numbers from episodes' `info`, by name: their sum, and the number of episodes."""
        with self._lock:
            for name, entry in sums.items():
                if name in self._infos or len(self._infos) < MAX_NAMES:
                    window = self._infos.setdefault(name, deque())
                    window.append(entry)
                    num_episodes = sum(count for _, count in window)
                    while num_episodes - window[0][1] >= EPISODE_WINDOW:
                        num_episodes -= window.popleft()[1]

    @property
    def info_names(self) -> set[str]:
        """The names of the numbers in `info` that came so far."""
        with self._lock:
            return set(self._infos)

    def observe(self, metrics: dict[str, float]) -> None:
        """Add figures that belong to no update, such as sizes of queues; means are reported."""
        with self._lock:
            self._add(metrics)

    def count(self, name: str, number: int) -> None:
        """Add to a figure that is reported as its sum since the start."""
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + number

    def take_news(self) -> dict[str, Any]:
        """What to send to other learners: nothing, as there are none (see `SharedStats`)."""
        return {}

    def add_news(self, all_news: list[dict[str, Any]]) -> None:
        """Add what other learners have sent: nothing."""

    def _add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] = self._counts.get(name, 0) + 1

    @property
    def mean_episode_return(self) -> float | None:
        """The mean return of the last EPISODE_WINDOW episodes; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def mean_episode_step(self) -> float | None:
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def summary(self) -> dict[str, float | int | None]:
        """All figures so far, and means of the metrics since the last call."""
        with self._lock:
            means = {name: total / self._counts[name] for name, total in self._sums.items()}
            self._sums.clear()
            self._counts.clear()
            return {**self._so_far(), **means}

    def latest(self) -> dict[str, float | int | None]:
        """All figures so far, and the metrics of the last update; changes nothing."""
        with self._lock:
            return {**self._so_far(), **self._last_update}

    def _so_far(self) -> dict[str, float | int | None]:
        return {
            "step": self.step,
            "updates": self.updates,
            "episodes": self.episodes,
            "mean_episode_return": self.mean_episode_return,
            "mean_episode_step": self.mean_episode_step,
            **{f"info/{name}": _mean(window) for name, window in self._infos.items()},
            **self._totals,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "updates": self.updates,
            "episodes": self.episodes,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "infos": {name: list(window) for name, window in self._infos.items()},
            "totals": dict(self._totals),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        # TorchBeast's checkpoints have only the steps.
        self.updates = state.get("updates", 0)
        self.episodes = state.get("episodes", 0)
        self._returns.extend(state.get("returns", ()))
        self._lengths.extend(state.get("lengths", ()))
        self._infos.update({name: deque(w) for name, w in state.get("infos", {}).items()})
        self._totals.update(state.get("totals", {}))  # older checkpoints have none


def _mean(window: Iterable[tuple[float, int]]) -> float:
    totals, counts = zip(*window, strict=True)
    return sum(totals) / sum(counts)
