"""Vector environments, in each of Gymnasium's reset modes, against environments stepped singly."""

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from libtorchbeast.sync_envs import SyncEnvs
from tests.helpers.schedules import Scheduled, scheduled_vector
from torchbeast.envs import EnvOptions, make_envs
from torchbeast.envs.spaces import observe
from torchbeast.envs.vector import VectorEnvs
from torchbeast.errors import UsageError

FIELDS = ("reward", "done", "truncated", "episode_step", "episode_return", "last_action")
ENDS = [[3, 1, 2], [1, 4], [2, 2, 2, 1]]
LIMITS = [[-3, 2, -1], [-1, -2], [2, -4, 1]]
STEPS = 40


def rows_of(envs, steps=STEPS):
    """Of each environment, its rows as tuples; actions depend on the time alone."""
    rng = np.random.default_rng(0)
    rows = [envs.reset()]
    rows += [envs.step(rng.integers(2, size=envs.num_envs)) for _ in range(steps)]
    return [
        [(*row["frame"][i].tolist(), *(row[name][i].item() for name in FIELDS)) for row in rows]
        for i in range(envs.num_envs)
    ]


def singly(lengths):
    episodes = iter(lengths)
    return SyncEnvs(lambda: Scheduled(next(episodes)), len(lengths), observe=observe, rebuild=False)


def learnt(rows):
    """The transitions that are learnt from: what is seen, what comes of it."""
    pairs = itertools.pairwise(rows)
    return [
        (before[:2], after[2], after[3], None if after[3] else after[:2], after[-1])
        for before, after in pairs
        if not after[4]
    ]


def finished(rows):
    """Steps and return of each finished episode."""
    return [(row[5], row[6]) for row in rows if row[3] and row[5] > 0]


def test_rows_of_an_environment_that_we_reset_are_those_of_single_ones_at_true_ends():
    envs = VectorEnvs(scheduled_vector(3, AutoresetMode.DISABLED, ENDS))
    assert rows_of(envs) == rows_of(singly(ENDS))


def test_a_time_limit_is_the_same_row_by_row_if_we_reset():
    """An episode is begun and given up while the extra row is shown, hence all alike."""
    lengths = [[-3], [-1], [-2]]
    envs = VectorEnvs(scheduled_vector(3, AutoresetMode.DISABLED, lengths))
    assert rows_of(envs) == rows_of(singly(lengths))


@pytest.mark.parametrize("lengths", [ENDS, LIMITS], ids=["ends", "limits"])
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_what_is_learnt_did_happen(mode, lengths):
    """Every transition learnt from is one of a single environment with the same action."""
    for i, rows in enumerate(rows_of(VectorEnvs(scheduled_vector(3, mode, lengths)))):
        transitions = learnt(rows)
        assert len(transitions) > STEPS / 3
        for (episode, time), reward, done, after, action in transitions:
            length = lengths[i][int(episode)]
            assert time < abs(length)  # nothing is learnt of acting where an episode is over
            assert reward == 10 * (time + 1) + 3 + action
            assert done == (time + 1 == length)
            assert after is None or after == (episode, time + 1)


def test_a_reset_at_the_next_step_is_not_learnt_from_and_no_episode_is_lost():
    ours = rows_of(VectorEnvs(scheduled_vector(3, AutoresetMode.NEXT_STEP, ENDS)))
    for rows, expected in zip(ours, rows_of(singly(ENDS), steps=2 * STEPS), strict=True):
        assert (
            [row[:2] for row in rows if row[4]]
            == [  # the extra rows begin episodes
                row[:2] for row in rows if row[3] and row[1] == 0
            ][1:]
        )
        assert all(row[2] == 0 for row in rows if row[4])
        steps = [episode[0] for episode in finished(rows)]
        assert len(steps) > 8
        assert steps == [episode[0] for episode in finished(expected)][: len(steps)]


def test_a_reset_at_the_same_step_gives_the_rows_of_single_ones_at_true_ends():
    envs = VectorEnvs(scheduled_vector(3, AutoresetMode.SAME_STEP, ENDS))
    assert rows_of(envs) == rows_of(singly(ENDS))


def test_a_reset_at_the_same_step_shows_the_last_observation_at_a_time_limit():
    (rows,) = rows_of(VectorEnvs(scheduled_vector(1, AutoresetMode.SAME_STEP, [[-3, 5]])), 6)
    assert [row[:2] for row in rows] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert [row[3] for row in rows] == [True, False, False, False, True, False, False]
    assert [row[4] for row in rows] == [False, False, False, False, True, False, False]


def test_a_vector_environment_must_say_when_it_resets():
    env = scheduled_vector(1, AutoresetMode.NEXT_STEP, ENDS)
    env.metadata = {}
    with pytest.raises(UsageError, match=r"AutoresetMode\.NEXT_STEP if it resets at"):
        VectorEnvs(env)
    env.metadata = {"autoreset_mode": "NextStep"}
    VectorEnvs(env).close()


def any_mode(num_envs, autoreset_mode=AutoresetMode.SAME_STEP):
    return scheduled_vector(num_envs, autoreset_mode, LIMITS)


def test_a_factory_that_takes_the_mode_is_asked_to_leave_resets_to_us():
    envs = make_envs(EnvOptions(f"{__name__}:any_mode"), num_envs=3)
    assert envs._mode is AutoresetMode.DISABLED
    assert len(rows_of(envs)) == 3


def frozen_lakes(num_envs):
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("FrozenLake-v1")] * num_envs)


def test_numbers_may_be_observations_of_vectors():
    envs = make_envs(EnvOptions(f"{__name__}:frozen_lakes"), num_envs=3, seed=0)
    assert envs.reset()["frame"].tolist() == [0, 0, 0]
    assert envs.observation_spec.num_categories == (16,)
