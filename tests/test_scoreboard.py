"""The scoreboard keeps runs, does none twice, and makes its table from the files alone."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.threads import wait_until

PATH = Path(__file__).parent.parent / "benchmarks" / "scoreboard.py"


@pytest.fixture(scope="module")
def scoreboard():
    spec = importlib.util.spec_from_file_location("scoreboard", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scoreboard"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scoreboard"]


@pytest.fixture
def make_run(scoreboard):
    def make(system="ours", seed=1, minutes=10.0, last=20.0):
        """A return that grows evenly to `last`, a thousand steps a second."""
        seconds = range(0, int(60 * minutes) + 1, 10)
        curve = (scoreboard.Point(s, 1000 * s, last * s / (60 * minutes)) for s in seconds)
        return scoreboard.Run("pong", system, seed, minutes, 1200.0, "c", "m", "v", tuple(curve))

    return make


def test_a_run_is_kept_as_it_was(scoreboard, make_run, tmp_path):
    run = make_run()
    run.save(tmp_path)
    assert scoreboard.Run.load(tmp_path / "pong" / "ours-1.csv").curve[1].steps == 10_000
    assert [path.name for path in (tmp_path / "pong").iterdir()] == ["ours-1.csv"]


def test_returns_are_those_until_then(make_run):
    run = make_run()
    assert run.return_at(5) == 10.0
    assert run.return_at(10) == 20.0
    assert run.return_at(20) is None  # it was shorter
    assert run.first_above(18).seconds == 540
    assert run.first_above(21) is None


def test_the_report_compares_after_the_time_that_all_have(scoreboard, make_run, tmp_path, capsys):
    make_run().save(tmp_path)
    make_run(seed=2, last=10.0).save(tmp_path)
    make_run("sb3-ppo", minutes=20.0, last=8.0).save(tmp_path)
    make_run("sb3-a2c", last=2.0).save(tmp_path)
    make_run("ours-with-something-else", last=1000.0).save(tmp_path)  # neither ours nor a peer
    picture = tmp_path / "picture.png"
    options = scoreboard.Options(results=tmp_path, picture=picture, report=True)
    pytest.importorskip("matplotlib")
    scoreboard.main(options)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {
        "pong": {"ours": 15.0, "best_peer": 4.0, "best_peer_name": "sb3-ppo", "minutes": 10.0}
    }
    [ours] = [line for line in table if line.startswith("| ours |")]
    assert "| 7.5 (5 to 10) | 15 (10 to 20) |" in ours
    assert "| 9, 1 of 2 never | 5.4e+05 |" in ours
    assert picture.stat().st_size > 1000


def test_no_run_is_done_twice(scoreboard, make_run, tmp_path, monkeypatch):
    make_run(seed=1).save(tmp_path)
    make_run(seed=2, minutes=1.0).save(tmp_path)  # too short
    trained = []

    def train(name, system, seed, options):
        trained.append(seed)
        return make_run(seed=seed)

    monkeypatch.setattr(scoreboard, "train", train)
    scoreboard.train_all(scoreboard.Options(seeds=3, minutes=10, results=tmp_path))
    assert trained == [2, 3]


def test_a_command_is_ended_after_its_minutes_with_all_that_it_started(
    scoreboard, tmp_path, monkeypatch
):
    monkeypatch.setattr(scoreboard, "SAMPLE_S", 0.5)
    pid = tmp_path / "pid"
    program = f"sleep 100 & echo $! > {pid}; while :; do :; done"
    started, cpu_s = scoreboard.watch(["sh", "-c", program], 0.05, tmp_path / "log")
    assert time.time() - started < 60
    assert cpu_s > 0.1
    child = int(pid.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_a_command_that_fails_says_its_last_words(scoreboard, tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with 3:\n.*no such thing"):
        scoreboard.watch(["sh", "-c", "echo no such thing; exit 3"], 1, tmp_path / "log")


@pytest.mark.parametrize("wrong", [{"tasks": ("chess",)}, {"systems": ("sb4",)}, {"args": "--x"}])
def test_mistakes_are_told_before_anything_is_trained(scoreboard, wrong):
    with pytest.raises(SystemExit, match=r"choose from|--name"):
        scoreboard.main(scoreboard.Options(**wrong))
