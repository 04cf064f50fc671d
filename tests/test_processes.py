"""Helper processes do not outlive their parent."""

import subprocess
import sys

import psutil

from tests.threads import wait_until
from tests.training import ROOT


def test_a_child_that_is_busy_when_its_parent_dies_ends(tmp_path):
    marker = tmp_path / "pid"
    command = [sys.executable, "-m", "tests.busy_child", str(marker)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == -9
    wait_until(lambda: not psutil.pid_exists(int(marker.read_text())), 30)
