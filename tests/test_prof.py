"""Timings against NumPy."""

import numpy as np
import pytest

from torchbeast.core import prof


def test_means_and_deviations_are_right(monkeypatch):
    spans = {"a": [0.1, 0.3, 0.2], "b": [1.0, 2.0, 4.0]}
    now = [0.0]
    monkeypatch.setattr(prof.timeit, "default_timer", lambda: now[0])
    timings = prof.Timings()
    for a, b in zip(*spans.values(), strict=True):
        timings.reset()
        for name, span in (("a", a), ("b", b)):
            now[0] += span
            timings.time(name)
    for name, values in spans.items():
        assert timings.means()[name] == pytest.approx(np.mean(values))
        assert timings.stds()[name] == pytest.approx(np.std(values))
    lines = timings.summary("title").splitlines()
    assert lines[0] == "title"
    assert lines[1].strip().startswith("b: 2333.333ms")
