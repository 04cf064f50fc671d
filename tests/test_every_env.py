"""benchmarks/every_env.py: what counts as trained, and that its commands are right."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.helpers.training import TIMEOUT_S

PATH = Path(__file__).parent.parent / "benchmarks" / "every_env.py"


@pytest.fixture(scope="module")
def every_env():
    spec = importlib.util.spec_from_file_location("every_env", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_one_trains_and_one_is_refused(every_env, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [str(PATH), "CartPole-v1", "GymV21Environment-v0"])
    assert every_env.main() == 0
    *_, trained, refused, figures = capsys.readouterr().out.splitlines()
    assert trained.startswith("| `CartPole-v1` | trained | ")
    assert int(trained.split("|")[3].replace(",", "")) >= every_env.TOTAL_STEPS
    assert refused.startswith("| `GymV21Environment-v0` | refused |  |  | --env GymV21Environment")
    assert '"tried": 2, "trained": 1, "refused": 1, "failed": 0' in figures


def judge(every_env, log, code=0, stderr=""):
    return every_env.judge("X-v0", subprocess.CompletedProcess([], code, "", stderr), log)


@pytest.mark.parametrize(
    ("steps", "result"), [([2048, 5120], "trained"), ([2048, 4096], "failed"), ([], "failed")]
)
def test_trained_is_code_0_with_all_steps(every_env, tmp_path, steps, result):
    log = tmp_path / "logs.csv"
    log.write_text("".join(["step,sps\n", *(f"{step},100\n" for step in steps)]))
    outcome = judge(every_env, log)
    assert outcome.result == result
    if result == "failed":
        assert outcome.sentence == f"ended after {max(steps, default=0):,} of 5,000 steps"


def test_a_run_without_a_log_has_not_trained(every_env, tmp_path):
    assert judge(every_env, tmp_path / "none").result == "failed"


@pytest.mark.parametrize(
    ("code", "stderr", "result", "sentence"),
    [
        (2, "warning\nerror: install what it needs.\n", "refused", "install what it needs."),
        (1, "error: all of them failed.\n", "failed", "exit code 1"),
        (2, "usage\n", "failed", "exit code 2"),
        (0, "Traceback (most recent\nKeyError: 3\n", "failed", "traceback: KeyError: 3"),
    ],
)
def test_all_else_is_refused_by_a_sentence_or_has_failed(
    every_env, tmp_path, code, stderr, result, sentence
):
    log = tmp_path / "logs.csv"
    log.write_text("step,sps\n9000,100\n")
    outcome = judge(every_env, log, code, stderr)
    assert (outcome.result, outcome.sentence) == (result, sentence)
