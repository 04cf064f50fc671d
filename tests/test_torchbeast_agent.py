"""Agents published for TorchBeast run as they are."""

import os
import re
import subprocess
import sys

import psutil
import pytest

from tests.helpers.training import ROOT, read_logs


@pytest.mark.slow
def test_an_agent_written_for_torchbeast_learns_and_ends_tidily(tmp_path):
    basename = f"unix:{tmp_path}/recall"
    command = [sys.executable, "-m", "tests.helpers.torchbeast_agent",
               "--basename", basename, "--savedir", str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    counts = re.search(r"^(\d+) steps, (\d+) learnt from", result.stdout, re.MULTILINE)
    assert counts, result.stdout
    assert int(counts[1]) >= int(counts[2]) > 0
    assert float(read_logs(tmp_path / "recall")[-1]["mean_episode_return"]) >= 0.9
    assert (tmp_path / "latest").resolve() == (tmp_path / "recall").resolve()
    assert not processes_that_mention(basename)


def processes_that_mention(text: str) -> list[psutil.Process]:
    """Children keep their parent's command line."""
    found = [p for p in psutil.process_iter(["cmdline"]) if p.pid != os.getpid()]
    return [p for p in found if text in " ".join(p.info["cmdline"] or [])]
