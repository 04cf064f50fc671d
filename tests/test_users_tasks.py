"""Tasks as users have them are learnt with the plain command, and get the settings for them."""

import pytest

from tests.helpers.training import (
    ROOT,
    TIMEOUT_S,
    RemoteEnvironments,
    Training,
    learn,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


@pytest.mark.parametrize(
    ("beast", "task", "bar"),
    [
        ("polybeast", "Bandit", 9.5),  # rewards of 1 and 10 are told apart
        ("monobeast", "ByteCatch", 0.8),  # a board of bytes that are 0 or 1
        ("monobeast", "wide_integers", 4.5),  # uint16
        ("polybeast", "one_number", 4.5),  # a Box without dimensions
    ],
)
def test_a_task_of_ones_own_is_learnt_with_the_defaults(beast, task, bar, tmp_path):
    args = ("--env", f"tests.helpers.tasks:{task}", "--log_interval_s", "1")
    learn(beast, tmp_path, bar, *args, "--total_steps", "150000")


def test_environments_that_dial_in_get_the_settings_for_what_they_are(tmp_path):
    address = f"unix:{tmp_path}/socket"
    args = ("--env", "remote", "--listen", address, "--entropy_cost", "0.02")
    with Training("polybeast_learner", tmp_path, *args, cwd=ROOT) as training:
        env = ("--env", "tests.helpers.tasks:Corridor", "--env_kwargs", '{"size": 9}')
        env += ("--num_servers", "1", "--connect", address)
        with RemoteEnvironments(tmp_path, *env, cwd=ROOT):
            training.wait_for_step(1)
    assert "(recipe): total_steps 1000000, unroll_length 64" in training.output
    assert "(command line): entropy_cost 0.02" in training.output
