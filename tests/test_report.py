"""What people see: the live view, log messages beside it, curves."""

import csv
import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.training import ROOT
from torchbeast.core.file_writer import FileWriter
from torchbeast.core.stats import RunningStats
from torchbeast.report import figures, plot, reporter, terminal
from torchbeast.report.figures import tag_of
from torchbeast.report.plot import Options, draw, read_curve
from torchbeast.report.tensorboard import TensorBoard

FIGURES = {
    "step": 123_456,
    "sps": 1500.0,
    "mean_episode_return": -12.345,
    "total_loss": 1.5,
    "episodes": 77,
    "policy_lag": 2.0,
}


def render(view):
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view._render())
    return console.export_text()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        terminal,
        "time",
        SimpleNamespace(monotonic=lambda: clock.now, strftime=time.strftime, gmtime=time.gmtime),
    )
    return clock


def test_the_live_view_shows_the_figures_under_their_names(clock):
    view = terminal.LiveView(total_steps=1_000_000)
    view.tick(108_456)
    clock.now += 10.0
    view.tick(123_456)
    assert "Starting" in render(view)
    view.show(FIGURES)
    text = render(view)
    for part in ("step 123,456 of 1,000,000", "12%", "elapsed 0:00:00", "left 09:44", "sps 1,500"):
        assert part in text, part
    for part in ("mean_episode_return -12.35", "total_loss 1.50", "episodes 77", "policy_lag 2.0"):
        assert part in text, part


def test_bar_and_numbers_agree_between_two_logs(clock):
    view = terminal.LiveView(total_steps=1_000_000)
    view.show(FIGURES)
    view.tick(485_000)
    clock.now += 10.0
    view.tick(500_000)
    text = render(view)
    assert "step 500,000 of" in text
    assert "50%" in text
    assert "left 05:33" in text


def test_the_time_that_is_left_is_by_the_speed_of_the_last_minute(clock):
    """Not by that of an interval, in which there may be one update or none."""
    pace = terminal.Pace()
    assert pace.time_left(1000) == "?"
    for i in range(100):  # an update of 20 steps every two seconds, after a slow start
        pace.see(20 * (i // 2) if i >= 20 else 0)
        clock.now += 1.0
        if i < 20:
            assert pace.time_left(1000) == "?"
    assert pace.time_left(1000) == "00:02"
    assert pace.time_left(100_980) == "2.8 h"


def test_a_live_view_that_gets_no_step_says_for_whom_it_waits():
    view = terminal.LiveView(total_steps=1_000_000)
    view.show(FIGURES)
    view.tick(123_456)
    view.stall(3.0, "")
    assert "No step" not in render(view)
    view.stall(12.4, "waiting for [::1]:4242 (no such port).")
    text = render(view)
    assert "No step for 12 s: waiting for [::1]:4242 (no such port)." in text
    assert "sps 0" in text
    assert "left ?" in text
    view.stall(0.0, "")
    assert "sps 1,500" in render(view)


def test_plain_lines_say_the_same(clock, capsys):
    view = terminal.PlainView(1_000_000)
    view.tick(108_456)
    clock.now += 10.0
    view.tick(123_456)
    view.show({**FIGURES, "mean_episode_return": None})
    line = capsys.readouterr().out
    assert line == (
        "step 123,456 of 1,000,000 | sps 1,500 | left 09:44 | mean_episode_return - | "
        "total_loss 1.50\n"
    )


def test_plain_lines_say_once_a_minute_that_no_step_comes(capsys):
    view = terminal.PlainView(1_000_000)
    for seconds in range(75):
        view.stall(seconds, "waiting for Actor 1.")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"No step for {s} s: waiting for Actor 1." for s in (10, 70)]
    for seconds in (0, 9, 10):
        view.stall(seconds, "waiting for Actor 2.")
    assert capsys.readouterr().out == "No step for 10 s: waiting for Actor 2.\n"


class Recorder:
    """A view that keeps what it is told."""

    def __init__(self):
        self.stalls, self.shown = [], []

    def show(self, figures):
        self.shown.append(figures)

    def stall(self, seconds, text):
        self.stalls.append((seconds, text))

    def start(self):
        pass

    tick = lambda self, *_: None  # noqa: E731
    stop = start


def test_the_reporter_counts_the_seconds_since_the_last_step(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: clock.now))
    view = Recorder()
    monkeypatch.setattr(reporter, "make_view", lambda total_steps: view)
    stats = RunningStats()
    writer = FileWriter("run", rootdir=tmp_path)
    with reporter.Reporter(writer, stats, 1000, log_interval_s=1.0) as report:
        clock.now += 20
        report.update("for {:.0f} s.".format)
        stats.step = 10
        report.update("for {:.0f} s.".format)
    assert view.stalls == [(20.0, "for 20 s."), (0.0, "")]


@pytest.mark.parametrize(("seconds", "num_rows"), [(5, 25), (300, 120)])
def test_a_short_run_has_a_curve_and_few_lines(tmp_path, monkeypatch, seconds, num_rows):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(reporter, "time", SimpleNamespace(monotonic=lambda: clock.now))
    view = Recorder()
    monkeypatch.setattr(reporter, "make_view", lambda total_steps: view)
    stats = RunningStats()
    with reporter.Reporter(FileWriter("run", rootdir=tmp_path), stats, 1000, 5.0) as report:
        clock.now += 30  # until environments are there
        for _ in range(20 * seconds):
            clock.now += 0.05
            stats.add_update(50, {"total_loss": clock.now})
            report.update()
    assert len(view.shown) == pytest.approx(seconds / 5, abs=3)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    with (tmp_path / "run" / "logs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(events.Scalars("train/total_loss")) == pytest.approx(num_rows, rel=0.2)
    assert all(float(row["sps"]) == pytest.approx(1000) for row in rows[1:])
    assert all("total_loss" in figures for figures in view.shown)  # the last one's, too
    # All of the last row's losses, and of no other's, are in its mean.
    assert int(rows[-1]["step"]) == 1000 * seconds == view.shown[-1]["step"]


def test_docs_list_all_figures_and_no_others():
    text = (ROOT / "docs" / "runs.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| (`[\w/]+`|the horizontal axis) \| (.*) \|$", text, re.MULTILINE
    )
    tags = {name: f"`{tag_of(name)}`" for name in figures.FIGURES} | {"step": "the horizontal axis"}
    assert rows == [(name, tags[name], f.meaning) for name, f in figures.FIGURES.items()]


def test_tensorboard_has_the_names_of_the_table_in_groups(tmp_path):
    board = TensorBoard(tmp_path, first_step=0)
    figures = {"step": 5, "total_loss": 1.0, "sps": 2.0, "my_loss": 0.5, "eval": None}
    board.log({**figures, "info/is_success": 0.5}, 5)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = ["info/is_success", "own/my_loss", "system/sps", "train/total_loss"]
    assert sorted(events.Tags()["scalars"]) == tags


def test_log_messages_go_to_what_stderr_is_now(capsys):
    handler = terminal._CurrentStderr()
    handler.emit(logging.LogRecord("x", logging.INFO, "f", 1, "hello", None, None))
    assert capsys.readouterr().err == "hello\n"
    assert handler.stream is sys.stderr


def test_a_curve_is_drawn_without_the_pauses(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    times = [0, 5, 10, 15, 1000, 1005]  # resumed after a long pause
    rows = [f"{1000 + t},{100 * i},{'' if i == 0 else i}" for i, t in enumerate(times)]
    (run / "logs.csv").write_text("\n".join(["_time,step,mean_episode_return", *rows]) + "\n")
    curve = read_curve(run)
    assert curve["steps"] == [100, 200, 300, 400, 500]
    assert curve["minutes"][-1] == pytest.approx(25 / 60)
    draw(Options(runs=(run,), out=tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def write_log(run, *rows):
    run.mkdir()
    (run / "logs.csv").write_text("\n".join(rows) + "\n")


def test_any_figure_can_be_drawn(tmp_path, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "curve.png"
    names = "_tick,_time,step,mean_episode_return,eval_return,eval_step,info/won"
    write_log(run, names, "0,1000,100,5,,,", "1,1005,200,6,7,150,0.5", "2,1010,300,6,,,0.75")
    assert read_curve(run, "info/won")["values"] == [0.5, 0.75]
    assert read_curve(run, "info/won")["steps"] == [200, 300]
    evaluated = read_curve(run, "eval_return")
    assert [evaluated["steps"], evaluated["values"]] == [[150], [7]]  # by the weights' own step
    command = ["plot", "--runs", str(run), "--out", str(out), "--figure", "info/won"]
    monkeypatch.setattr(sys, "argv", command)
    assert plot.main() == 0
    assert capsys.readouterr().out == f"info/won of 1 runs is drawn in {out}\n"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_figure_is_refused_with_those_that_there_are(tmp_path, monkeypatch, capsys):
    run, out = tmp_path / "run", tmp_path / "curve.png"
    write_log(run, "_tick,_time,step,mean_episode_return,info/won", "0,1000,100,5,")
    for figure, sentence in {
        "info/lost": "has no figure info/lost; it has info/won, mean_episode_return.",
        "info/won": "has no info/won yet; there is nothing to draw.",
    }.items():
        command = ["plot", "--runs", str(run), "--out", str(out), "--figure", figure]
        monkeypatch.setattr(sys, "argv", command)
        assert plot.main() == 2
        assert capsys.readouterr().err == f"error: {run} {sentence}\n"
    assert not out.exists()


@pytest.mark.parametrize("what", ["missing", "empty", "without episodes"])
def test_a_run_without_a_curve_is_refused_with_a_sentence(tmp_path, capsys, monkeypatch, what):
    run, out = tmp_path / "run", tmp_path / "curve.png"
    if what != "missing":
        run.mkdir()
        row = "" if what == "empty" else "_time,step,mean_episode_return\n1000,100,\n"
        (run / "logs.csv").write_text(row)
    monkeypatch.setattr(sys, "argv", ["plot", "--runs", str(run), "--out", str(out)])
    assert plot.main() == 2
    sentence = "is no run: it has no logs.csv" if what == "missing" else "has no finished episode"
    assert f"error: {run} {sentence}" in capsys.readouterr().err
    assert not out.exists()
