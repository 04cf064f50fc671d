"""Every command in the README is run, with fewer steps and in a folder of its own."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.training import Background

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PYTHON = ".venv/bin/python"


def commands():
    blocks = re.findall(r"```shell\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = "".join(blocks).splitlines()
    return [line.partition("#")[0].strip() for line in lines]


def run(command, **options):
    return subprocess.run(
        command, cwd=ROOT, timeout=240, capture_output=True, text=True, check=False, **options
    )


def test_the_readme_names_both_commands():
    assert {"make train", "make test"} <= set(commands())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Runs are kept below the home folder: give them another."""
    return {**os.environ, "HOME": str(tmp_path_factory.mktemp("home"))}


def test_the_python_commands_work_in_their_order(home):
    """What is tested or drawn was trained before."""
    seed = [sys.executable, "-m", "torchbeast.polybeast", "--env", "Catch"]
    assert (
        run([*seed, "--total_steps", "1000"], env=home).returncode == 0
    )  # stands for `make train`
    lines = [line for line in commands() if line.startswith(PYTHON) and "polybeast_" not in line]
    assert len(lines) >= 4
    for line in lines:
        trains = "beast --env" in line
        command = [sys.executable, *shlex.split(line.replace("~", home["HOME"]))[1:]]
        result = run(command + ["--total_steps", "1000"] * trains, env=home)
        assert result.returncode == 0, f"{line}\n{result.stderr}"


def test_the_commands_for_more_machines_work_in_pairs(home, tmp_path):
    lines = [line for line in commands() if line.startswith(PYTHON) and "polybeast_" in line]
    [actors] = [line for line in lines if "polybeast_actor" in line]
    lines.remove(actors)
    pairs = [lines[i : i + 2] for i in range(0, len(lines), 2)]
    pairs += [[actors, line] for line in lines if "polybeast_learner --listen" in line]
    assert len(pairs) == 3
    for number, pair in enumerate(pairs):
        (tmp_path / str(number)).mkdir()
        check_pair(sorted(pair), home, tmp_path / str(number))


def check_pair(pair, home, folder):
    """The environments of the first command, fewer of them, teach the learner of the second."""
    port = str(free_port())
    args = ["--env", "Catch"]
    if not any("4242" in line for line in pair):
        args += ["--pipes_basename", f"unix:{folder}/polybeast"]
    environments, learner = (
        [sys.executable, *shlex.split(line.replace("4242", port).replace(" 10", " 2"))[1:], *args]
        for line in pair
    )
    with Background(environments, folder / "environments", cwd=ROOT, env=home) as background:
        result = run([*learner, "--total_steps", "1000"], env=home)
        assert result.returncode == 0, result.stderr
        assert background.end(signal.SIGTERM) == 0, background.output


@pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="make would set up another environment than this one"
)
def test_make_train_takes_arguments(home):
    (line,) = [line for line in commands() if line.startswith("make train ARGS")]
    line = line.replace("200000", "1000")
    result = run(shlex.split(line), env=home)
    assert result.returncode == 0, result.stderr
    assert "Training on CartPole-v1" in result.stdout
    assert (Path(home["HOME"]) / "logs/torchbeast/latest/model.tar").exists()


def test_make_test_runs_pytest():
    result = run(["make", "-n", "test"])
    assert result.returncode == 0
    assert "-m pytest" in result.stdout
