"""The commands of docs/cluster.md: the local ones are run, flags of the others are parsed."""

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import tyro

from tests.helpers.training import ROOT, TIMEOUT_S, Background, Training, listening_at
from torchbeast import keys, polybeast_learner
from torchbeast.fleet.__main__ import VERBS
from torchbeast.fleet.flags import Flags
from torchbeast.run.flags import given_flags

PAGE = Path(ROOT, "docs/cluster.md").read_text()


def commands(module):
    """The arguments of each command that runs it; what stands for other flags is left out."""
    lines = re.findall(rf"^    python -m torchbeast\.{module}( .*)$", PAGE, re.MULTILINE)
    return [shlex.split(line.partition("#")[0].replace("...", "")) for line in lines]


def fleets(launcher):
    started = [args for args in commands("fleet") if args[0] not in VERBS]
    parsed = [(args, tyro.cli(Flags, args=args)) for args in started]
    return [(args, flags) for args, flags in parsed if flags.launcher == launcher]


@pytest.mark.parametrize("launcher", ["local", "ray", "slurm"])
def test_there_is_an_example_for_each_launcher(launcher):
    [(_, flags)] = fleets(launcher)
    assert flags.connect is not None
    flags._check_launcher()


def test_the_flags_of_the_learner_are_its_own():
    assert all(given_flags(polybeast_learner.Flags, args) for args in commands("polybeast_learner"))


def test_the_keys_can_be_made_in_that_order(tmp_path):
    for args in commands("keys"):
        assert keys.main([*args, "--folder", str(tmp_path / "keys"), "--replace"]) == 0
    made = {path.name for path in (tmp_path / "keys").iterdir()}
    assert {name for name in re.findall(r"keys/([\w.]+)", PAGE) if name != "remote.md"} <= made


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_example_on_this_machine_trains(tmp_path):
    [args, *_] = [args for args in commands("polybeast_learner") if "Catch" in args]
    args = [value.replace("4242", "0") for value in args]
    with Training("polybeast_learner", tmp_path, *args) as training:
        training.wait_for(lambda: listening_at(training), "address")
        [(fleet_args, flags)] = fleets("local")
        at = [value.replace(flags.connect, listening_at(training)) for value in fleet_args]
        program = [sys.executable, "-m", "torchbeast.fleet", *at, "--savedir", str(tmp_path)]
        with Background(program, tmp_path / "fleet-output", cwd=ROOT) as fleet:
            training.wait_for_step(1000)
            assert fleet.end(signal.SIGTERM) == 0
        assert training.end(signal.SIGTERM) == 0
