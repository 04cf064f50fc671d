"""The commands that the examples' first lines give work as they are, with fewer steps."""

import ast
import os
import shlex
import subprocess
import sys

import pytest

from tests.helpers.examples import ROOT
from tests.helpers.training import TIMEOUT_S

LINES = {
    f"{path.stem}: {line.strip()}": shlex.split(line)
    for path in sorted((ROOT / "examples").glob("*.py"))
    for line in (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
    if line.strip().startswith("python ")
}
TRAIN = {n: w for n, w in LINES.items() if w[1] == "-m" and "--env" in w and "remote" not in w}
TRAIN = {name: words for name, words in TRAIN.items() if "--mode" not in words}
PACKAGES = {"pettingzoo_meeting": "pettingzoo"}


def test_the_commands_are_found():
    programs = {words[1] if words[1] != "-m" else words[2] for words in LINES.values()}
    assert {"torchbeast.polybeast", "torchbeast.monobeast"} <= programs
    names = {name.partition(":")[0] for name in TRAIN}
    assert {"tic_tac_toe", "pettingzoo_meeting", "gru_memory", "transformer_memory"} <= names


@pytest.mark.parametrize("name", LINES)
def test_a_commands_program_is_there(name):
    _, first, second, *_ = [*LINES[name], ""]
    path = first if first != "-m" else f"{second.replace('.', '/')}.py"
    assert (ROOT / path).exists(), path


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
@pytest.mark.parametrize("name", TRAIN)
def test_what_is_trained_can_be_tested_as_it_stands_there(name, tmp_path):
    """The commands of one file in their order, in a home of their own."""
    example = name.partition(":")[0]
    if example in PACKAGES:
        pytest.importorskip(PACKAGES[example])
    home = {**os.environ, "HOME": str(tmp_path)}
    for other, words in LINES.items():
        if other.partition(":")[0] != example:
            continue
        command = [sys.executable, *words[1:]]
        command += ["--num_episodes", "2"] if "--mode" in words else ["--total_steps", "1000"]
        result = subprocess.run(
            command, cwd=ROOT, env=home, timeout=TIMEOUT_S, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{other}\n{result.stderr}"
