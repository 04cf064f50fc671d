"""A saved run's flags are the defaults of whoever goes on with it, or plays it."""

import json
import shlex
import subprocess
import sys

import pytest
import torch

from tests.helpers.specs import spec_for
from torchbeast import monobeast, polybeast
from torchbeast.core.learner import Learner
from torchbeast.core.settings import Settings
from torchbeast.models import make_model
from torchbeast.run import checkpoint
from torchbeast.run import saved_run as saved_run_module
from torchbeast.run.command_line import run_command_line
from torchbeast.run.signals import StopRequest
from torchbeast.run.training import run_training


def test_what_names_code_is_known():
    assert saved_run_module.names_code("wrappers", "my.module:Wrapper")
    assert saved_run_module.names_code("imports", "my_module")
    assert saved_run_module.names_code("env", "my.module:make")
    for name in ("wrappers", "imports", "env_kwargs", "env"):
        assert not saved_run_module.names_code(name, "")


def saved_run(savedir, **values):
    """A run that was trained for a while with these flags."""
    flags = monobeast.Flags(savedir=savedir, xpid="run", **{"env": "Catch", **values})
    learner = make_learner(flags)
    learner.stats.step, learner.stats.updates = 400, 5
    flags.rundir.mkdir(parents=True, exist_ok=True)
    checkpoint.save(flags.rundir / checkpoint.FILE_NAME, learner, flags)
    return flags


def make_learner(flags):
    model = make_model("mlp", spec_for((10, 5), 3), flags.use_lstm)
    return Learner(model, flags, torch.device("cpu"))


def parse(savedir, *args, beast=monobeast):
    seen = []
    args = ["--savedir", str(savedir), "--xpid", "run", *args]
    code = run_command_line(beast.Flags, lambda flags: seen.append(flags) or 0, args)
    return seen[0] if seen else code


def train(flags):
    """The frame of a training that ends at once."""
    learner = make_learner(flags)
    assert run_training(flags, learner, lambda run: None, StopRequest()) == 0
    return learner


def test_the_name_of_a_run_is_enough_to_go_on_with_its_settings(tmp_path):
    saved = saved_run(tmp_path, learning_rate=0.0001, batch_size=3, use_lstm=True, num_actors=7)
    for beast in (monobeast, polybeast):
        flags = parse(tmp_path, beast=beast)
        assert (flags.env, flags.learning_rate, flags.batch_size) == ("Catch", 0.0001, 3)
        assert flags.use_lstm
        assert flags.total_steps == saved.total_steps  # not what the recipe says today
        assert flags.num_actors == beast.Flags().num_actors  # of the machine, not of the run


def test_what_the_command_line_changes_is_printed_and_kept(tmp_path, capsys):
    train(saved_run(tmp_path, learning_rate=0.0001, total_steps=1000))
    saved_run(tmp_path, learning_rate=0.0001, total_steps=1000, num_actors=7)
    flags = parse(tmp_path, "--learning_rate", "0.003")
    capsys.readouterr()
    learner = train(flags)
    printed = capsys.readouterr().out
    assert "Changed by the command line: learning_rate 0.0001 -> 0.003\n" in printed
    assert f"Of this start, not of the run: num_actors 7 -> {flags.num_actors}\n" in printed
    # Of 1000 steps 400 are taken: 60 % of the rate are left.
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.0018)
    assert "The learning rate goes on at 0.0018, at step 400 of 1,000." in printed
    history = json.loads((flags.rundir / "meta.json").read_text())["history"]
    assert [start["step"] for start in history] == [400, 400]
    assert history[0]["changes"] == {}
    assert history[1]["changes"] == {"learning_rate": [0.0001, 0.003]}


def test_a_batch_size_that_was_given_is_kept_by_who_goes_on(tmp_path):
    train(parse(tmp_path, "--env", "Catch", "--batch_size", "24"))
    for beast in (monobeast, polybeast):
        flags = parse(tmp_path, beast=beast)
        assert (flags.batch_size, flags.target_policy_lag) == (24, None)
    assert parse(tmp_path, "--target_policy_lag", "20").target_policy_lag == 20


def test_settings_that_differ_from_help_are_printed_with_their_source(tmp_path, capsys):
    train(parse(tmp_path, "--env", "Catch", "--seed", "7", "--batch_size", "8"))
    printed = capsys.readouterr().out
    assert "Differs from --help (recipe): total_steps 1000000, unroll_length 64" in printed
    said = (
        "Differs from --help (command line): seed 7, target_policy_lag None\n"  # 8 is the default
    )
    assert said in printed
    saved_run(tmp_path, learning_rate=0.25)
    train(parse(tmp_path))
    assert "Differs from --help (saved run): learning_rate 0.25\n" in capsys.readouterr().out


def test_an_environment_that_equals_the_default_is_taken_if_it_is_given(tmp_path):
    saved_run(tmp_path)
    default = monobeast.Flags().env
    assert parse(tmp_path, "--mode", "test").env == "Catch"
    assert parse(tmp_path, "--mode", "test", "--env", default).env == default


def test_an_agent_of_remote_environments_plays_one_that_is_named(tmp_path, capsys):
    saved_run(tmp_path, env="remote")
    args = ["--savedir", str(tmp_path), "--xpid", "run", "--mode", "test", "--num_episodes", "2"]
    assert run_command_line(monobeast.Flags, monobeast.test, [*args, "--env", "Catch"]) == 0
    assert "Mean return over 2 episodes" in capsys.readouterr().out
    assert run_command_line(monobeast.Flags, monobeast.test, args) == 2
    assert "environments that dialled in; name one to play with --env" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_to_copy_works(tmp_path):
    (tmp_path / "mine.py").write_text("from torchbeast.envs.toys import Catch as make")
    saved_run(tmp_path, env="mine:make")
    args = ["--savedir", str(tmp_path), "--xpid", "run", "--mode", "test", "--num_episodes", "1"]
    command = [sys.executable, "-m", "torchbeast.monobeast", *args]
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": tmp_path}
    refused = subprocess.run(command, check=False, **options)
    assert refused.returncode == 2, refused.stderr
    copied = shlex.split(refused.stderr.split("name it, too: ")[1])
    assert "Mean return" in subprocess.run(copied, check=True, **options).stdout


def test_a_recipe_cannot_be_changed_under_a_run(tmp_path, capsys):
    saved_run(tmp_path)
    assert parse(tmp_path, "--recipe", "paper") == 2
    assert "--recipe paper does not reach" in capsys.readouterr().err


def test_a_checkpoint_of_an_older_tree_brings_what_it_has(tmp_path):
    path = saved_run(tmp_path, learning_rate=0.0001).rundir / checkpoint.FILE_NAME
    contents = torch.load(path, weights_only=True)
    contents["flags"] = {"env": "Catch", "learning_rate": 0.0001, "num_threads": 4}
    contents["stats"] = {"step": 400, "mean_episode_return": 1.0}  # as in TorchBeast
    del contents["random_state"]
    torch.save(contents, path)
    flags = parse(tmp_path)
    assert flags.learning_rate == 0.0001
    assert flags.entropy_cost == Settings().entropy_cost  # not what the recipe says today
    assert not flags.separate_nets  # or its weights would not fit
    assert train(flags).stats.step == 400
