"""What people see: the live view, log messages beside it, curves."""

import logging
import sys

import pytest
from rich.console import Console

from torchbeast.report import terminal
from torchbeast.report.plot import Options, draw, read_curve

FIGURES = {
    "step": 123_456,
    "sps": 1500.0,
    "mean_episode_return": -12.345,
    "total_loss": 1.5,
    "episodes": 77,
    "policy_lag": 2.0,
}


def test_the_live_view_shows_the_figures():
    view = terminal.LiveView(total_steps=1_000_000)
    view.tick(123_456)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view._render())
    assert "Starting the actors" in console.export_text()
    view.show(FIGURES)
    console.print(view._render())
    text = console.export_text()
    for part in ("123,456", "1,000,000", "1,500", "-12.35", "1.50", "09:44", "12%", "77"):
        assert part in text, part


def test_plain_lines_say_the_same(capsys):
    terminal.PlainView(1_000_000).show({**FIGURES, "mean_episode_return": None})
    line = capsys.readouterr().out
    assert line == "step 123,456 of 1,000,000 | 1,500 SPS | left 09:44 | return - | loss 1.50\n"


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
