"""Fleets with the command lines of their users, for tests."""

import subprocess
import sys

from tests.helpers.training import ROOT, TIMEOUT_S, Background

PROGRAM = [sys.executable, "-m", "torchbeast.fleet"]


def fleet(savedir, *args, code=0, **options):
    """Run a command until it ends; what it printed."""
    result = subprocess.run(
        [*PROGRAM, *args, "--savedir", str(savedir)],
        capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT, check=False, **options,
    )  # fmt: skip
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def running(savedir, name, **options):
    """The lines of tasks that run, as `status` shows them."""
    lines = fleet(savedir, "status", "--name", name, **options).splitlines()
    return [line for line in lines if line.split()[1:2] == ["running"]]


class LocalFleet(Background):
    """A fleet on this machine, in the background."""

    def __init__(self, savedir, *args, **options):
        super().__init__(
            [*PROGRAM, *args, "--savedir", str(savedir)], savedir / "output", **options
        )
