"""Statistics of a run with several learners: each rank has those of all ranks together."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from libtorchbeast.episode_info import InfoSums, add_sums
from torchbeast.core.stats import RunningStats

# Figures of an update that are means over steps, or the same on all ranks. Others are sums, such as
# losses.
MEANS = {
    "clipped_rho_fraction",
    "effective_sample_size",
    "explained_variance",
    "grad_norm",
    "policy_lag",
}
# Figures that belong to no update and are summed over ranks: sizes. Others are averaged.
POLLED_SIZES = {"num_actors", "learner_queue_size", "inference_queue_size"}
SIZES = POLLED_SIZES | {"batch_size"}


class SharedStats(RunningStats):
    """What this rank adds is news, which counts only after it has been exchanged with other ranks.

    `add_update` counts at once: all ranks call it with the same values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._polled: dict[tuple[int, str], float] = {}  # newest value, by rank and name
        self._forget_news()

    def add_episodes(self, returns: Iterable[float], lengths: Iterable[int]) -> None:
        with self._lock:
            self._news_episodes += [list(pair) for pair in zip(returns, lengths, strict=True)]

    def add_info(self, sums: InfoSums) -> None:
        with self._lock:
            add_sums(self._news_info, sums)

    def observe(self, metrics: dict[str, float]) -> None:
        with self._lock:
            for name, value in metrics.items():
                if math.isfinite(value):
                    total, number = self._news_observed.get(name, (0.0, 0))
                    self._news_observed[name] = (total + value, number + 1)

    def count(self, name: str, number: int) -> None:
        with self._lock:
            self._news_counts[name] = self._news_counts.get(name, 0) + number

    def take_news(self) -> dict[str, Any]:
        """This rank's news since the last call, in a form for JSON."""
        with self._lock:
            news = {
                "episodes": self._news_episodes,
                "info": self._news_info,
                "observed": self._news_observed,
                "counts": self._news_counts,
            }
            self._forget_news()
            return news

    def add_news(self, all_news: list[dict[str, Any]]) -> None:
        """Add the news of all ranks, given in the order of the ranks."""
        sizes: dict[str, float] = {}
        polled: set[str] = set()
        for rank, news in enumerate(all_news):
            if news["episodes"]:
                super().add_episodes(*zip(*news["episodes"], strict=True))
            super().add_info({name: (sums[0], sums[1]) for name, sums in news["info"].items()})
            for name, number in news["counts"].items():
                super().count(name, number)
            with self._lock:
                for name, (total, number) in news["observed"].items():
                    if name in POLLED_SIZES:  # not in every exchange: keep each rank's newest
                        polled.add(name)
                        self._polled[rank, name] = total / number
                    elif name in SIZES:
                        sizes[name] = sizes.get(name, 0.0) + total / number
                    else:
                        self._sums[name] = self._sums.get(name, 0.0) + total
                        self._counts[name] = self._counts.get(name, 0) + number
        for name in polled:
            sizes[name] = sum(v for (_, size), v in self._polled.items() if size == name)
        super().observe(sizes)

    def _forget_news(self) -> None:
        self._news_episodes: list[list[float]] = []
        self._news_info: InfoSums = {}
        self._news_observed: dict[str, tuple[float, int]] = {}
        self._news_counts: dict[str, int] = {}


def mean_figures(steps: list[dict[str, float]]) -> dict[str, float]:
    """An update's figures from those of its optimizer steps; `weight` is the steps in each."""
    figures = {}
    for name in dict.fromkeys(name for step in steps for name in step if name != "weight"):
        known = [(step[name], step["weight"]) for step in steps if name in step]
        sum_of = math.fsum(value for value, _ in known)
        figures[name] = weighted_mean(known) if name in MEANS else sum_of / len(steps)
    return figures


def merge_figures(figures: list[dict[str, float]], num_steps: list[int]) -> dict[str, float]:
    """An update's figures from those of each rank, and the steps that each has learnt from."""
    merged = {}
    for name in dict.fromkeys(name for of_rank in figures for name in of_rank):
        known = [(f[name], n) for f, n in zip(figures, num_steps, strict=True) if name in f]
        sum_of = math.fsum(value for value, _ in known)
        merged[name] = weighted_mean(known) if name in MEANS else sum_of
    return merged


def weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """The mean of (value, weight) pairs, without values that are not finite."""
    known = [(value, weight) for value, weight in values if math.isfinite(value)]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else math.nan
