"""The examples that train from Python run as they are, with fewer steps."""

import re
import subprocess
import sys

import pytest

from tests.helpers.examples import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = {  # and the packages that they need beyond ours
    "cartpole": [],
    "own_environment": [],
    "minigrid_room": ["minigrid"],
    "nethack": ["nle"],
    "mujoco_cheetah": ["mujoco", "imageio"],
    "many_games": [],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path):
    for package in EXAMPLES[name]:
        pytest.importorskip(package)
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--total_steps", "2000"]
    result = subprocess.run(
        [*command, "--savedir", str(tmp_path)],
        cwd=tmp_path,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert re.search(r"step [2-4],\d+ of 2,000", result.stdout)
    assert (tmp_path / "latest" / "model.tar").exists()
    assert (name != "own_environment") or (tmp_path / "latest" / "test.mp4").exists()
