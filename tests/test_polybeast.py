"""PolyBeast as users run it: it learns, it resumes, and what breaks is restarted or reported."""

import functools
import json
import os
import re
import signal

import psutil
import pytest
import torch

from tests.helpers import training
from tests.helpers.default_flags import default_flags
from tests.helpers.training import (
    ROOT,
    TIMEOUT_S,
    final_return,
    newest_figures,
    read_logs,
    shared_memory,
)
from torchbeast import polybeast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]

run = functools.partial(training.run, "polybeast")
Training = functools.partial(training.Training, "polybeast")

SMALL = ("--env", "Catch", "--total_steps", "100000000")


def train(tmp_path, *args, **options):
    result = run(tmp_path, "--xpid", "run", *args, cwd=ROOT, **options)
    assert result.returncode == 0, result.stderr
    return final_return(tmp_path / "run")


# --- It learns --------------------------------------------------------------------------------


def test_catch_is_learnt_and_leaves_its_files_and_can_be_tested(tmp_path):
    total = 100_000
    before = shared_memory()
    assert train(tmp_path, "--env", "Catch", "--total_steps", str(total)) > 0.9
    assert shared_memory() == before
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.tar", "logs.csv", "fields.csv", "out.log", "meta.json"} <= names
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is True
    last = newest_figures(tmp_path / "run")
    flags = default_flags(polybeast.Flags, "Catch")
    assert total <= int(last["step"]) < total + flags.batch_size * flags.unroll_length
    saved = torch.load(tmp_path / "run" / "model.tar", weights_only=True)
    assert saved["stats"]["step"] == int(last["step"])
    for name in ("learner_queue_size", "inference_batch_size", "inference_idle", "learner_idle"):
        assert float(last[name]) >= 0
    waits = [float(last[f"actors_wait_for_{who}"]) for who in ("environments", "agent", "learner")]
    assert sum(waits) == pytest.approx(1.0)

    test = run(tmp_path, "--mode", "test", "--num_episodes", "5")
    assert test.returncode == 0, test.stderr
    assert re.search(r"Mean return over 5 episodes: 1\.00", test.stdout), test.stdout
    # The other beast goes on where this one stopped: one checkpoint, one learner.
    args = ("--env", "Catch", "--xpid", "run", "--total_steps", str(total + 5000))
    resumed = training.run("monobeast", tmp_path, *args)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resuming at step {int(last['step']):,} of" in resumed.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("--num_servers", "3", "--num_actors", "5", "--envs_per_actor", "3", "--batch_size", "7"),
        ("--num_servers", "1", "--num_actors", "1", "--envs_per_actor", "1"),
        ("--num_inference_threads", "2", "--num_learner_threads", "2", "--batch_size", "32"),
        ("--max_policy_lag", "1", "--unroll_length", "3", "--max_learner_queue_size", "64"),
        ("--autocast", "bf16", "--learner_device", "cpu", "--actor_device", "cpu"),
        ("--num_actions", "3", "--pipes_basename", "unix:/tmp/elsewhere", "--use_lstm"),
    ],
    ids=lambda args: args[0].strip("-"),
)
def test_settings_of_all_kinds_run(tmp_path, args):
    result = run(tmp_path, "--env", "Catch", "--total_steps", "4000", "--xpid", "run", *args)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert int(read_logs(tmp_path / "run")[-1]["step"]) >= 4000


def test_a_model_that_answers_with_a_tuple_fits_everywhere(tmp_path):
    args = ("--env", "Catch", "--xpid", "run", "--model", "tests.helpers.agents:TupleAgent")
    args += ("--no-hold_actors",)
    result = run(tmp_path, *args, "--total_steps", "20000", "--log_interval_s", "0.2", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    lags = [float(row["policy_lag"]) for row in read_logs(tmp_path / "run") if row["policy_lag"]]
    assert max(lags) > 0  # its weights have versions, too
    result = training.run("monobeast", tmp_path, *args, "--total_steps", "22000", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    result = run(tmp_path, *args, "--mode", "test", "--num_episodes", "2", cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_rollouts_of_old_weights_are_dropped_and_counted(tmp_path):
    args = ("--env", "Catch", "--total_steps", "20000", "--max_policy_lag", "0", "--no-hold_actors")
    result = run(tmp_path, "--xpid", "run", *args, "--log_interval_s", "0.2")
    assert result.returncode == 0, result.stderr
    dropped = [float(row["dropped_rollouts"]) for row in read_logs(tmp_path / "run")]
    assert max(dropped) > 0


def test_a_profile_of_all_threads_can_be_written(tmp_path):
    with Training(tmp_path, *SMALL, "--write_profiler_trace") as training:
        training.wait_for((training.folder / "trace.json").exists, "trace")
        assert training.end(signal.SIGTERM) == 0
    assert "aten::" in (tmp_path / "run" / "trace.json").read_text()


def test_a_bad_flag_is_one_sentence(tmp_path):
    for args, sentence in [
        (("--learner_device", "gpu7"), "--learner_device must be auto, cpu or cuda"),
        (("--actor_device", "cuda", "--disable_cuda"), "--disable_cuda contradict each other"),
        (
            ("--max_learner_queue_size", "2"),
            "max_learner_queue_size must be 0 or at least batch_size",
        ),
        (("--num_servers", "0"), "num_servers must be more than 0, got 0"),
    ]:
        result = run(tmp_path, "--env", "Catch", *args)
        assert result.returncode == 2
        assert sentence in result.stderr
        assert "Traceback" not in result.stderr


# --- What breaks ------------------------------------------------------------------------------


def test_a_killed_worker_is_told_and_replaced(tmp_path):
    with Training(tmp_path, *SMALL) as training:
        training.wait_for_step(1)
        main = psutil.Process(training.process.pid)
        before = main.num_fds(), main.num_threads()
        for times in range(1, 6):
            training.actors()[0].kill()
            training.wait_for(
                lambda n=times: training.output.count("killed by SIGKILL; restarting it") == n,
                "message",
            )
            training.wait_for_step(training.step + 3000)
        training.wait_for(
            lambda: main.num_fds() <= before[0] and main.num_threads() <= before[1], "tidiness"
        )
        assert training.end(signal.SIGTERM) == 0


def test_a_model_that_raises_while_it_trains_ends_the_run_with_its_traceback(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from torchbeast.models import Agent\n"
        "class Broken(Agent):\n"
        "    def __init__(self, shape, actions, lstm):\n"
        "        super().__init__(shape, actions, lstm, 'mlp')\n"
        "    def forward(self, inputs, state):\n"
        "        if inputs['done'].shape[0] > 2:  # not yet when it is tried\n"
        "            raise ValueError('the model is out of tea')\n"
        "        return super().forward(inputs, state)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = run(tmp_path, "--env", "Catch", "--model", "broken:Broken", env=env)
    assert result.returncode == 1
    assert "the model is out of tea" in result.stderr
