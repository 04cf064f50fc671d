"""The scoreboard keeps runs, does none twice, and makes its table from the files alone."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.threads import wait_until

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]

import curves  # noqa: E402
import environments  # noqa: E402
import scoreboard  # noqa: E402
from board import report, runs, tasks, training  # noqa: E402


@pytest.fixture
def make_run():
    def make(system="ours", seed=1, minutes=10.0, last=20.0):
        """A return that grows evenly to `last`, a thousand steps a second."""
        seconds = range(0, int(60 * minutes) + 1, 10)
        curve = (runs.Point(s, 1000 * s, last * s / (60 * minutes)) for s in seconds)
        return runs.Run("pong", system, seed, minutes, 1200.0, "c", "m", "v", tuple(curve))

    return make


def test_a_run_is_kept_as_it_was(make_run, tmp_path):
    run = make_run()
    run.save(tmp_path)
    assert runs.Run.load(tmp_path / "pong" / "ours-1.csv").curve[1].steps == 10_000
    assert [path.name for path in (tmp_path / "pong").iterdir()] == ["ours-1.csv"]


def test_returns_are_those_until_then(make_run):
    run = make_run()
    assert run.return_at(5) == 10.0
    assert run.return_at(10) == 20.0
    assert run.return_at(20) is None  # it was shorter
    assert run.first_above(18).seconds == 540
    assert run.first_above(21) is None


def test_the_report_compares_after_the_time_that_all_have(make_run, tmp_path, capsys):
    make_run().save(tmp_path)
    make_run(seed=2, last=10.0).save(tmp_path)
    make_run("sb3-ppo", minutes=20.0, last=8.0).save(tmp_path)
    make_run("sb3-a2c", last=2.0).save(tmp_path)
    make_run("ours-with-something-else", last=1000.0).save(tmp_path)  # neither ours nor a peer
    options = scoreboard.Options(results=tmp_path, report=True)
    pytest.importorskip("matplotlib")
    scoreboard.main(options)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {
        "pong": {"ours": 15.0, "best_peer": 4.0, "best_peer_name": "sb3-ppo", "minutes": 10.0}
    }
    ours, ours_by_steps = [line for line in table if line.startswith("| ours |")]
    assert "| 7.5 (5 to 10) | 15 (10 to 20) |" in ours
    assert "| 9, 1 of 2 never | 540,000 | 1,200 (1,200 to 1,200) | 2000 (2000 to 2000) |" in ours
    assert ours_by_steps.endswith(
        "| 2.5 (1.667 to 3.333) | 5 (3.333 to 6.667) | 10 (6.667 to 13.33) "
        "| 15 (10 to 20) |  | 540,000 |"
    )
    [variant] = [line for line in table if line.startswith("| ours-with-something-else |")]
    assert variant.endswith("| 166.7 | 333.3 | 666.7 | 1000 |  | 20,000 |")
    for picture in ("scoreboard.png", "variants.png"):
        assert (tmp_path / picture).stat().st_size > 1000


def test_no_run_is_done_twice(make_run, tmp_path, monkeypatch):
    make_run(seed=1).save(tmp_path)
    make_run(seed=2, minutes=1.0).save(tmp_path)  # too short
    trained = []

    def train(name, system, seed, minutes, args, kept):
        trained.append(seed)
        return make_run(seed=seed)

    monkeypatch.setattr(scoreboard, "train", train)
    scoreboard.train_all(scoreboard.Options(("pong",), seeds=3, minutes=10, results=tmp_path))
    assert trained == [2, 3]


def test_a_command_is_ended_after_its_minutes_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAMPLE_S", 0.2)
    pid = tmp_path / "pid"
    program = f"sleep 100 & echo $! > {pid}; while :; do :; done"
    started, cpu_s = training.watch(["sh", "-c", program], 0.02, tmp_path / "log")
    assert time.time() - started < 60
    assert cpu_s > 0.1
    child = int(pid.read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_a_command_that_fails_says_its_last_words(tmp_path):
    with pytest.raises(training.RunFailed, match=r"ended with 3:\n.*no such thing"):
        training.watch(["sh", "-c", "echo no such thing; exit 3"], 1, tmp_path / "log")


def test_a_run_without_an_episode_is_no_result(monkeypatch):
    monkeypatch.setattr(training, "command_of_ours", lambda *_: ["sh", "-c", "echo stuck"])
    with pytest.raises(training.RunFailed, match=r"no episode end in 1 minutes:\nstuck"):
        training.train("pong", "ours", 1, 1.0, "", "ours")


@pytest.mark.parametrize(
    "wrong", [{"tasks": ("chess",)}, {"systems": ("sb4",)}, {"args": "--x"}, {"name": "sb3-ppo"}]
)
def test_mistakes_are_told_before_anything_is_trained(wrong):
    with pytest.raises(SystemExit, match=r"choose|--name"):
        scoreboard.main(scoreboard.Options(**wrong))


def test_one_that_fails_does_not_keep_others_from_running(make_run, tmp_path, monkeypatch, capsys):
    def train(name, system, seed, minutes, args, kept):
        if system == "sb3-a2c":
            raise training.RunFailed("out of luck")
        return make_run(system, seed)

    monkeypatch.setattr(scoreboard, "train", train)
    systems = ("ours", "sb3-a2c", "sf-appo")
    options = scoreboard.Options(("pong",), systems, seeds=1, results=tmp_path)
    assert scoreboard.train_all(options) == ["pong, sb3-a2c, seed 1"]
    assert "out of luck" in capsys.readouterr().err
    assert runs.load_all(tmp_path)["pong"].keys() == {"ours", "sf-appo"}


def test_a_run_that_is_interrupted_ends_its_processes_and_leaves_no_file(tmp_path):
    """With a process in place of training that starts another, outside of its group."""
    pids = tmp_path / "pids"
    training_program = tmp_path / "training.py"
    training_program.write_text(f"""
import os, pathlib, subprocess, sys, time
sleep = "import os, time; os.setsid(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleep])
pathlib.Path({str(pids)!r}).write_text(f"{{os.getpid()}} {{child.pid}}.")
time.sleep(600)
""")
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import scoreboard
from board import training
training.command_of_ours = lambda *_: [sys.executable, {str(training_program)!r}]
scoreboard.end_as_after_ctrl_c()
results = pathlib.Path({str(tmp_path / "results")!r})
scoreboard.main(scoreboard.Options(("pong",), results=results))
"""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen([sys.executable, "-c", program], env={"TMPDIR": str(temporary)})
    try:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("."))
        below = [psutil.Process(int(pid)) for pid in pids.read_text()[:-1].split()]
        wait_until(lambda: any(temporary.iterdir()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait(60)
    gone, alive = psutil.wait_procs(below, timeout=60)
    assert len(gone) == 2
    assert not alive
    assert not any(temporary.iterdir())
    assert not (tmp_path / "results").exists()


def test_curves_of_peers_are_means_of_the_last_100_games(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "PERIOD_S", 0.0)
    curve = curves.Curve(str(tmp_path / "curve.csv"))
    curve.add_row(5)  # no game is over yet
    for value in range(200):
        curve.add_return(value)
    curve.add_row(1000)
    with (tmp_path / "curve.csv").open("a") as file:
        file.write("17.0,2000")  # was ended within a row
    [point] = training.read_peer(tmp_path, started=0.0)
    assert (point.steps, point.mean_return) == (1000, 149.5)


def test_peers_get_the_environment_without_preprocessing():
    env = environments.make_env("PongNoFrameskip-v4")
    assert env.observation_space.shape == (210, 160, 3)
    assert environments.is_atari("PongNoFrameskip-v4")
    assert environments.is_minatar(tasks.TASKS["minatar-breakout"].env)
    env.close()


def test_commands_name_the_environment_once(tmp_path):
    for task in tasks.TASKS.values():
        command = training.command_of_ours(task, 3, "--x 1", tmp_path)
        assert command.count("--env") == 1
        assert command[-2:] == ["--x", "1"]
    command = training.command_of_ours(tasks.TASKS["minatar-breakout"], 3, "", tmp_path)
    kwargs = json.loads(command[command.index("--env_kwargs") + 1])
    assert kwargs == {"game": "breakout", "use_minimal_action_set": True}
    command = training.command_of_peer(
        tasks.PEERS["sf-appo"], tasks.TASKS["minatar-breakout"], 3, tmp_path
    )
    assert command[2:6] == ["--env", "MinAtar/Breakout-v1", "--seed", "3"]


def test_curves_are_thinned_out_but_keep_their_end():
    points = [runs.Point(second, second, 0.0) for second in range(13)]
    assert [p.seconds for p in runs.thin_out(points, 5)] == [0, 5, 10, 12]
    assert runs.thin_out([], 5) == ()


def test_the_report_works_with_the_kept_files():
    found = runs.load_all(scoreboard.Options().results)
    for task, systems in found.items():
        lines = report.table_of(task, systems)
        assert len({line.count("|") for line in lines}) == 1
        assert report.summary_of(systems).keys() == {
            *("ours", "best_peer", "best_peer_name", "minutes")
        }
    assert found["pong"]["impala"][0].curve


def test_every_peer_has_a_program():
    for peer in tasks.PEERS.values():
        assert (BENCHMARKS / "peers" / peer.program).exists()
