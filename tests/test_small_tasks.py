"""benchmarks/small_tasks.py: it trains what is missing, and its commands are those of the docs."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def small_tasks(monkeypatch):
    path = ROOT / "benchmarks" / "small_tasks.py"
    spec = importlib.util.spec_from_file_location("small_tasks", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "small_tasks", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_commands_are_those_of_the_results(small_tasks):
    text = (ROOT / "docs" / "results.md").read_text()
    for name, task in small_tasks.TASKS.items():
        steps = "" if task.total_steps == 1_000_000 else f" --total_steps {task.total_steps}"
        assert f"| `{task.args}{steps}`" in text, name


def test_only_what_is_missing_is_trained(small_tasks, tmp_path, monkeypatch, capsys):
    def write(run, steps):
        run.mkdir(exist_ok=True)
        rows = [f"{1000 + i},{step},{i}" for i, step in enumerate(steps)]
        (run / "logs.csv").write_text("\n".join(["_time,step,mean_episode_return", *rows]) + "\n")

    trained = []

    def train(options, name, seed):
        trained.append((name, seed))
        write(options.run_of(name, seed), [100_000, 200_001])

    write(tmp_path / "catch-1", [100_000, 150_000, 200_001])
    write(tmp_path / "catch-2", [100_000])  # was stopped
    monkeypatch.setattr(small_tasks, "train", train)
    out = tmp_path / "curves.png"
    args = ["small_tasks.py", "--savedir", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*args, "--tasks", "Catch", "Memory, GRU"])
    assert small_tasks.main() == 0
    assert trained == [("Catch", 2), ("Memory, GRU", 1), ("Memory, GRU", 2)]
    assert out.read_bytes().startswith(b"\x89PNG")
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == {"Catch": [2.0, 1.0], "Memory, GRU": [1.0, 1.0]}
