"""What both beasts do alike for users: learn with the defaults, stop, and report what broke."""

import os
import re
import signal

import pytest
import torch

from tests.helpers.training import (
    ROOT,
    TIMEOUT_S,
    Training,
    fragile,
    learn,
    read_logs,
    run,
    shared_memory,
)
from torchbeast.report.figures import FIGURES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.parametrize("beast", ["monobeast", "polybeast"]),
]

ENDLESS = ("--env", "Catch", "--total_steps", "100000000")


# --- They learn -------------------------------------------------------------------------------


def test_cart_pole_is_learnt_with_the_defaults(beast, tmp_path):
    learn(beast, tmp_path, 400, "--env", "CartPole-v1")


def test_pictures_are_learnt_with_the_defaults(beast, tmp_path):
    steps = {"monobeast": "130000", "polybeast": "150000"}[beast]
    learn(
        beast,
        tmp_path,
        0.8,
        "--env",
        "tests.helpers.image_catch:ImageCatch",
        "--total_steps",
        steps,
    )


def test_memory_is_learnt_with_lstm(beast, tmp_path):
    steps = {"monobeast": "100000", "polybeast": "150000"}[beast]
    learn(beast, tmp_path, 0.9, "--env", "Memory", "--total_steps", steps, "--use_lstm")


@pytest.mark.parametrize("hold", [True, False])
def test_actors_that_wait_for_the_learner_have_no_lag(beast, tmp_path, hold):
    args = ("--num_actors", "1", "--envs_per_actor", "16", "--batch_size", "16")  # one group
    args += ("--hold_actors" if hold else "--no-hold_actors", "--log_interval_s", "0.2")
    result = run(
        beast, tmp_path, "--env", "Catch", "--total_steps", "30000", *args, "--xpid", "run"
    )
    assert result.returncode == 0, result.stderr
    lags = [float(row["policy_lag"]) for row in read_logs(tmp_path / "run") if row["policy_lag"]]
    assert (max(lags) == 0) == hold


@pytest.mark.parametrize("action", ["int32", "float32"])
def test_actions_and_states_of_any_dtype_are_learnt_from_and_played(beast, tmp_path, action):
    args = ("--model", "tests.helpers.agents:OddAgent", "--xpid", "run")
    args += ("--use_lstm",) if action == "float32" else ()  # which it takes for its sign
    result = run(beast, tmp_path, "--env", "Catch", "--total_steps", "3000", *args, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    played = run(beast, tmp_path, "--mode", "test", *args, "--num_episodes", "3", cwd=ROOT)
    assert played.returncode == 0, played.stderr
    assert "Mean return over 3 episodes" in played.stdout


def test_a_models_own_loss_and_another_optimizer_are_learnt_with(beast, tmp_path):
    args = ("--env", "Catch", "--total_steps", "20000", "--xpid", "run")
    args += ("--optimizer", "adam", "--schedule", "constant", "--learning_rate", "0.001")
    args += ("--model", "tests.helpers.agents:LossAgent", "--log_interval_s", "0.2")
    result = run(beast, tmp_path, *args, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = read_logs(tmp_path / "run")
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.001] * len(rows))
    errors = [float(row["level_error"]) for row in rows if row["level_error"]]
    assert 0 < errors[-1] < errors[0]


def test_normalised_observations_and_rewards_are_kept_and_played_with(beast, tmp_path):
    args = ("--env", "CartPole-v1", "--xpid", "run", "--total_steps")
    flags = ("--normalize_observations", "--normalize_rewards")
    for total in (2000, 4000):  # the second time with the flags of the first
        result = run(beast, tmp_path, *args, str(total), *flags)
        assert result.returncode == 0, result.stderr
        saved = torch.load(tmp_path / "run" / "model.tar", weights_only=True)
        counts = [saved["model_state_dict"]["moments.0.count"],
                  saved["reward_scale"]["moments.count"]]  # fmt: skip
        assert counts == [saved["stats"]["step"]] * 2
        flags = ()
    played = run(beast, tmp_path, "--mode", "test", "--xpid", "run", "--num_episodes", "2")
    assert played.returncode == 0, played.stderr


def test_numbers_in_info_are_logged_under_their_names(beast, tmp_path):
    what = "return *self.env.step(action)[:2], True, False, {'is_success': 0.25, 'seed': 7}"
    env = fragile(tmp_path, "0 or self.steps % 10 == 0", what)
    args = ("--env", "fragile:make", "--xpid", "run", "--log_interval_s", "0.2")
    result = run(beast, tmp_path, *args, "--log_info", "is_success", "--total_steps", "4000",
                 env=env)  # fmt: skip
    assert result.returncode == 0, result.stderr
    last = read_logs(tmp_path / "run")[-1]
    assert float(last["info/is_success"]) == 0.25
    assert "info/seed" not in last


# --- They stop --------------------------------------------------------------------------------


def test_a_signal_saves_and_ends_tidily(beast, tmp_path):
    before = shared_memory()
    with Training(beast, tmp_path, *ENDLESS) as training:
        training.wait_for_step(1)
        training.stop(signal.SIGTERM, 0)
    assert shared_memory() == before


def test_killed_for_good_it_resumes_where_the_checkpoint_was(beast, tmp_path):
    before = shared_memory()
    with Training(beast, tmp_path, *ENDLESS, "--checkpoint_interval_s", "0.5") as training:
        training.wait_for_step(1)
        training.wait_for((training.folder / "model.tar").exists, "checkpoint")
        training.wait_for_step(training.step + 20_000)
        assert training.end(signal.SIGKILL) == -signal.SIGKILL  # all others end, too
    saved = torch.load(tmp_path / "run" / "model.tar", weights_only=True)["stats"]
    assert saved["step"] > 0
    with Training(beast, tmp_path, *ENDLESS) as training:
        training.wait_for_step(saved["step"] + 1)
        assert f"Resuming at step {saved['step']:,} of Catch" in training.output
        assert training.end(signal.SIGTERM) == 0
    after = torch.load(tmp_path / "run" / "model.tar", weights_only=True)["stats"]
    assert after["step"] > saved["step"]
    assert after["episodes"] > saved["episodes"]
    steps = [int(row["step"]) for row in read_logs(tmp_path / "run")]
    assert steps == sorted(steps)  # what was logged beyond the checkpoint is taken back
    assert shared_memory() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_at_the_start_is_heard(beast, tmp_path, number, code):
    (tmp_path / "slow.py").write_text(
        "import gymnasium, pathlib, time\n"
        "def make():\n"
        "    pathlib.Path(__file__).with_name('making').touch()\n"
        "    time.sleep(2)\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    args = ("--env", "slow:make", "--num_actors", "2")
    with Training(beast, tmp_path, *args, env=env) as training:
        training.wait_for((tmp_path / "making").exists, "environment")
        assert training.end(number) == code
        assert "Traceback" not in training.output


def test_the_same_wish_twice_still_saves(beast, tmp_path):
    """`timeout` and `make` each pass a signal on: two come within a moment."""
    with Training(beast, tmp_path, *ENDLESS) as training:
        training.wait_for_step(1)
        training.process.send_signal(signal.SIGTERM)
        assert training.end(signal.SIGTERM) == 0
    assert (tmp_path / "run" / "model.tar").exists()


def test_ctrl_c_in_a_terminal_reaches_the_whole_group_and_saves(beast, tmp_path):
    """A terminal sends SIGINT to every process of the group, not to the main one alone."""
    before = shared_memory()
    with Training(beast, tmp_path, *ENDLESS, start_new_session=True) as training:
        training.wait_for_step(1)
        training.stop(signal.SIGINT, 130, os.killpg)
    assert shared_memory() == before


# --- They report ------------------------------------------------------------------------------


def test_every_figure_that_a_run_logs_is_in_the_table(beast, tmp_path):
    args = ("--env", "Catch", "--total_steps", "5000", "--xpid", "run")
    result = run(beast, tmp_path, *args)
    assert result.returncode == 0, result.stderr
    names = set(read_logs(tmp_path / "run")[-1])
    assert names - FIGURES.keys() == {"_tick", "_time"}
    assert {"step", "sps", "mean_episode_return", "total_loss", "policy_lag"} <= names


# --- They report what broke ---------------------------------------------------------------------


def test_an_exception_in_an_environment_is_shown_and_training_goes_on(beast, tmp_path):
    """It is rebuilt alone: neither its neighbours nor its process are restarted."""
    env = fragile(tmp_path, 300, "raise BrokenPipeError('the simulator hung up')")
    args = ("--env", "fragile:make", "--total_steps", "20000", "--num_actors", "2")
    result = run(beast, tmp_path, *args, "--xpid", "run", env=env)
    assert result.returncode == 0, result.stderr
    assert "failed and is rebuilt" in result.stderr
    assert "the simulator hung up" in result.stderr
    assert "fragile.py" in result.stderr  # the traceback says where
    assert "restarting it" not in result.stderr
    assert "RuntimeWarning" not in result.stderr
    assert int(read_logs(tmp_path / "run")[-1]["step"]) >= 20_000


def test_numbers_too_large_to_learn_from_end_nothing_and_have_a_sender(beast, tmp_path):
    # With this weight the gradient is infinite for rewards of 1e9, which a row may hold.
    env = fragile(tmp_path, 40, "return self.env.step(action)[0], 1e9, False, False, {}")
    args = ("--env", "fragile:make", "--no-normalize_rewards", "--baseline_cost", "1e15")
    args = (*args, "--total_steps", "20000")
    result = run(beast, tmp_path, *args, "--xpid", "run", env=env)
    assert result.returncode == 0, result.stderr
    who = {"monobeast": "actor", "polybeast": "worker"}[beast]
    assert re.search(rf"environment \d+ of {who} \d .*reward from \d to 1e\+09", result.stderr)
    assert int(read_logs(tmp_path / "run")[-1]["nonfinite_rollouts"]) >= 2
    assert int(read_logs(tmp_path / "run")[-1]["step"]) >= 20_000


def test_an_environment_that_never_works_ends_the_run_with_its_traceback(beast, tmp_path):
    env = fragile(tmp_path, 3, "raise ValueError('the simulator is out of tea')")
    one = {"monobeast": "--num_actors", "polybeast": "--num_servers"}[beast]
    result = run(beast, tmp_path, "--env", "fragile:make", one, "1", env=env)
    assert result.returncode == 1
    who = {"monobeast": "actor", "polybeast": "worker"}[beast]
    assert f"{who.title()} 0 ended with exit code 1; restarting it" in result.stderr
    assert "giving it up after 5 failures in a row" in result.stderr
    *_, sentence = result.stderr.splitlines()
    assert sentence.startswith(f"Every {who} has failed 5 times in a row and is given up")
    assert "the simulator is out of tea" in result.stderr.split("error: Traceback")[1]
    assert "_process.py" not in result.stderr  # the user's traceback, and not ours


def test_what_environments_print_is_in_a_file_and_their_last_lines_in_the_report(beast, tmp_path):
    what = "import os; print('wheels: 4'); os.write(2, b'libsim: out of tea'); os.abort()"
    env = fragile(tmp_path, 150, what)  # after more steps than a process needs to be healthy
    with Training(beast, tmp_path, "--env", "fragile:make", env=env) as training:
        training.wait_for(lambda: "killed by SIGABRT; restarting it" in training.output, "abort")
        training.end(signal.SIGTERM)
    report = training.output.partition("killed by SIGABRT; restarting it.")[2]
    assert report.startswith("\nThe last that it printed:\nwheels: 4\nlibsim: out of tea\n")
    assert f"what environments print is in {training.folder}/envs.log" in training.output
    who = {"monobeast": "Actor", "polybeast": "Worker"}[beast]
    lines = (training.folder / "envs.log").read_text().splitlines()
    assert all(line.startswith(who) for line in lines)
    assert {line.partition(": ")[2] for line in lines} == {"wheels: 4", "libsim: out of tea"}


def test_a_missing_checkpoint_is_one_sentence_with_the_place(beast, tmp_path):
    result = run(beast, tmp_path, "--mode", "test", "--xpid", "nobody")
    assert result.returncode == 2
    assert str(tmp_path / "nobody" / "model.tar") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(beast, tmp_path):
    model = "tests.helpers.agents:ColumnAgent"
    result = run(beast, tmp_path, "--env", "Catch", "--model", model, "--total_steps", "1000")
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    assert errors == ["error: The model's `baseline` must be [T, B] = [2, 3], got [2, 3, 1]."]
    assert not list(tmp_path.glob("*/logs.csv"))
