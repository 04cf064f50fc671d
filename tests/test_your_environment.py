"""Every program and command of docs/your_environment.md is run, in order, with fewer steps."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.training import TIMEOUT_S, Background, read_logs

PAGE = (Path(__file__).parent.parent / "docs" / "your_environment.md").read_text()
BLOCKS = re.findall(r"```(python|shell)\n(.*?)```", PAGE, re.DOTALL)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


STEPS = {"100000": "1000", "200000": "4000", "200_000": "4000", "300000": "5000"}


def fewer(text):
    """With fewer steps; yet of episodes of 50 steps, each environment ends one."""
    for number, small in STEPS.items():
        text = text.replace(number, small)
    return text


def test_the_page_works_from_its_top_to_its_end(tmp_path):
    port = str(free_port())
    env = {**os.environ, "HOME": str(tmp_path)}
    commands = []
    for kind, block in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)[1]
            (tmp_path / name).write_text(fewer(block))
            continue
        commands += [
            [sys.executable, *shlex.split(fewer(line).replace("4242", port))[1:]]
            for line in block.splitlines()
        ]
    *one_by_one, learner, environments = commands
    assert len(one_by_one) == 7
    for command in one_by_one:
        result = run(command, tmp_path, env)
        assert "WARNING" not in result.stderr, result.stderr
    with Background(environments, tmp_path / "environments", cwd=tmp_path, env=env) as background:
        run(learner, tmp_path, env)
        assert background.end(signal.SIGTERM) == 0, background.output
    runs = tmp_path / "logs" / "torchbeast"
    assert int(read_logs(runs / "own")[-1]["step"]) >= 5000
    for name in ("track", "own", "from-python"):
        assert read_logs(runs / name)[-1]["info/is_success"], name
    assert (runs / "own" / "test.mp4").exists()
    assert (runs / "dialled" / "model.tar").exists()


def run(command, folder, env):
    result = subprocess.run(
        command,
        cwd=folder,
        env=env,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result
