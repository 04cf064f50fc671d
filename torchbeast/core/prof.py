"""A simple profiler: mean and deviation of the time between named points of a loop."""

import math
import timeit
from collections import defaultdict


class Timings:
    """Call `reset()` at the start of a loop's body and `time(name)` after each part of it."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        self._means: dict[str, float] = defaultdict(float)
        self._squares: dict[str, float] = defaultdict(float)  # summed squared deviations (Welford)
        self.reset()

    def reset(self) -> None:
        """Start the clock of the first part."""
        self.last_time = timeit.default_timer()

    def time(self, name: str) -> None:
        """Book the time since the last call under `name`."""
        now = timeit.default_timer()
        seconds, self.last_time = now - self.last_time, now
        self._counts[name] += 1
        deviation = seconds - self._means[name]
        self._means[name] += deviation / self._counts[name]
        self._squares[name] += deviation * (seconds - self._means[name])

    def means(self) -> dict[str, float]:
        """Seconds a call, by name."""
        return dict(self._means)

    def vars(self) -> dict[str, float]:
        return {name: self._squares[name] / count for name, count in self._counts.items()}

    def stds(self) -> dict[str, float]:
        return {name: math.sqrt(variance) for name, variance in self.vars().items()}

    def summary(self, prefix: str = "") -> str:
        """A table, the most expensive part first."""
        means, stds = self.means(), self.stds()
        total = sum(means.values()) or 1.0
        lines = [prefix]
        for name in sorted(means, key=lambda n: means[n], reverse=True):
            lines.append(
                f"    {name}: {1000 * means[name]:.3f}ms +- {1000 * stds[name]:.3f}ms "
                f"({100 * means[name] / total:.1f} %)"
            )
        lines.append(f"Total: {1000 * total:.3f}ms")
        return "\n".join(lines)
