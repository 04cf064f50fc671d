"""Games of several agents: each agent is an environment, also if it comes late or leaves early."""

import numpy as np
import pytest
import torch

from libtorchbeast.groups import Group, spec_of_group
from libtorchbeast.specs import ArraySpec
from tests.helpers import training
from tests.helpers.games import Relay, Signs
from torchbeast import monobeast, polybeast
from torchbeast.envs import EnvOptions, look_at, make_envs
from torchbeast.envs.pettingzoo import ParallelEnvs
from torchbeast.errors import UsageError
from torchbeast.run.checkpoint import FILE_NAME, save
from torchbeast.run.command_line import parse
from torchbeast.run.evaluate import Player, evaluate
from torchbeast.run.flags import TrainingFlags
from torchbeast.run.saved_run import describe_sources
from torchbeast.run.training import build_learner

GAMES = "tests.helpers.games"


def play(script, num_steps, num_envs=None):
    """Rows of a game, and the group."""
    envs = ParallelEnvs(lambda: Relay(script), num_envs or len(script), 0, whole_games=False)
    rows = [envs.reset()]
    rows += [envs.step(np.zeros(envs.num_envs, np.int64)) for _ in range(num_steps)]
    return rows, envs


def column(rows, agent, *names):
    """Of one agent: each row's values, bools as 0 and 1."""
    return [tuple(float(row[name][agent]) for name in names) for row in rows]


def test_a_game_whose_agents_end_together_is_like_so_many_environments():
    rows, _ = play({"a": (0, 2, "terminated"), "b": (0, 2, "terminated")}, 4)
    names = ("reward", "done", "truncated", "episode_step", "episode_return")
    expected = [(0, 1, 0, 0, 0), (1, 0, 0, 1, 1), (2, 1, 0, 2, 3), (1, 0, 0, 1, 1), (2, 1, 0, 2, 3)]
    assert column(rows, 0, *names) == column(rows, 1, *names) == expected
    # The row that ends an episode shows the first observation of the next.
    assert rows[2]["frame"].tolist() == [[0, 0], [1, 0]]


def test_a_time_limit_shows_the_last_observation_and_then_one_extra_row():
    rows, _ = play({"a": (0, 2, "truncated"), "b": (0, 2, "truncated")}, 4)
    assert column(rows, 0, "done", "truncated", "episode_step") == [
        *[(1, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 2)],
        (0, 0, 1),
    ]
    assert [row["frame"][0, 1] for row in rows] == [0, 1, 2, 0, 1]


def test_who_leaves_early_is_masked_until_the_game_starts_again():
    rows, _ = play({"a": (0, 2, "terminated"), "b": (0, 4, "terminated")}, 6)
    names = ("reward", "done", "truncated", "episode_step")
    assert column(rows, 0, *names) == [
        *[(0, 1, 0, 0), (1, 0, 0, 1), (2, 1, 0, 2)],
        *[(0, 1, 1, 0), (0, 1, 1, 0)],  # it is not there; the second is the new beginning
        *[(1, 0, 0, 1), (2, 1, 0, 2)],
    ]
    assert column(rows, 1, *names)[4] == (4, 1, 0, 4)
    assert [row["frame"][0, 1] for row in rows] == [0, 1, 0, 0, 0, 1, 0]


def test_who_hits_a_time_limit_early_has_its_episode_counted_once():
    rows, _ = play({"a": (0, 2, "truncated"), "b": (0, 4, "terminated")}, 5)
    ends = [row["done"][0] and row["episode_step"][0] > 0 for row in rows]
    assert ends == [False, False, False, True, False, False]
    assert rows[3]["episode_return"][0] == 3


def test_who_comes_late_begins_with_a_masked_row():
    rows, _ = play({"a": (0, 4, "terminated"), "b": (2, 4, "terminated")}, 5)
    names = ("reward", "done", "truncated", "episode_step")
    assert column(rows, 1, *names) == [
        *[(0, 1, 0, 0), (0, 1, 1, 0), (0, 1, 1, 0)],
        *[(3, 0, 0, 1), (4, 1, 0, 2), (0, 1, 1, 0)],
    ]
    assert rows[2]["frame"][1].tolist() == [1, 2]


def test_a_true_end_beside_a_time_limit_waits_for_the_extra_row():
    rows, _ = play({"a": (0, 2, "terminated"), "b": (0, 2, "truncated")}, 4)
    names = ("done", "truncated", "episode_step")
    assert column(rows, 0, *names) == [(1, 0, 0), (0, 0, 1), (1, 0, 2), (1, 1, 0), (0, 0, 1)]
    assert column(rows, 1, *names) == [(1, 0, 0), (0, 0, 1), (0, 0, 2), (1, 1, 2), (0, 0, 1)]


def test_places_that_no_game_fills_stay_empty():
    script = {"a": (0, 2, "terminated"), "b": (0, 2, "terminated")}
    rows, envs = play(script, 2, num_envs=5)
    assert [len(envs.envs), envs.num_envs] == [2, 5]
    assert rows[1]["truncated"].tolist() == [False, False, False, False, True]
    assert rows[2]["done"].all()
    assert rows[2]["episode_step"].tolist() == [2, 2, 2, 2, 0]


def test_a_game_that_fails_is_rebuilt_alone(caplog):
    made = []

    class Fragile(Relay):
        def __init__(self):
            super().__init__({"a": (0, 9, "terminated"), "b": (0, 9, "terminated")})
            self.number = len(made)
            made.append(self)

        def step(self, actions):
            if self.number == 1 and self._time == 1:
                raise RuntimeError("broken")
            return super().step(actions)

    group = Group(lambda seed: ParallelEnvs(Fragile, 4, seed, whole_games=False), seed=0)
    actions = np.zeros(4, np.int64)
    rows = [group.start(), group.step(actions), group.step(actions)]
    assert rows[-1]["truncated"].tolist() == [False, False, True, True]
    assert rows[-1]["episode_step"].tolist() == [2, 2, 0, 0]
    assert group.step(actions)["episode_step"].tolist() == [3, 3, 1, 1]
    assert "Game 1 failed and is rebuilt" in caplog.text


def test_agents_have_masks_and_any_observation():
    envs = ParallelEnvs(Signs, 4, seed=0, whole_games=False)
    spec = spec_of_group(envs, envs.reset())
    assert spec.observation["action_mask"] == ArraySpec("bool", (4,))
    assert spec.observation["others"].num_categories == (3,)


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        ("turns", "Turns lets one agent act at a time.*pettingzoo.utils.aec_to_parallel"),
        ("unequal", r"same action space, got Discrete\(3\) for a and Discrete\(4\) for b; wrap"),
    ],
)
def test_games_that_cannot_be_played_so_are_refused_with_a_sentence(factory, sentence):
    with pytest.raises(UsageError, match=sentence):
        look_at(EnvOptions(f"{GAMES}:{factory}"))


def test_groups_must_have_places_for_all_agents():
    options = EnvOptions(f"{GAMES}:relay")
    with pytest.raises(UsageError, match=r"all 2 agents .*got 1; leave --envs_per_actor out"):
        look_at(options, num_envs=1)
    with pytest.raises(UsageError, match="all 2 agents of a game, got 1"):
        make_envs(options, 1)
    with pytest.raises(UsageError, match="--frame_stack 2 is for single environments"):
        look_at(EnvOptions(f"{GAMES}:relay", frame_stack=2))


@pytest.mark.parametrize("beast", [monobeast, polybeast])
def test_the_plain_command_has_places_for_all_agents(beast):
    flags = parse(beast.Flags, ["--env", f"{GAMES}:crowd"])
    assert flags.envs_per_actor == 10
    (line,) = [line for line in describe_sources(flags) if "envs_per_actor" in line]
    assert line == "Differs from --help (agents of a game): envs_per_actor 10"
    fitting = parse(beast.Flags, ["--env", f"{GAMES}:relay"])
    assert fitting.envs_per_actor == beast.Flags.envs_per_actor
    # Also if fewer would do for a batch; but what is given stays.
    assert parse(beast.Flags, ["--env", f"{GAMES}:crowd", "--num_actors", "8"]).envs_per_actor == 10
    given = parse(beast.Flags, ["--env", f"{GAMES}:crowd", "--envs_per_actor", "4"])
    assert given.envs_per_actor == 4


@pytest.mark.slow
@pytest.mark.timeout(2 * training.TIMEOUT_S)
@pytest.mark.parametrize("beast", ["monobeast", "polybeast"])
def test_a_game_of_many_agents_trains_with_the_plain_command(beast, tmp_path):
    args = ("--env", f"{GAMES}:crowd", "--total_steps", "2000", "--xpid", "run")
    result = training.run(beast, tmp_path, *args)
    assert result.returncode == 0, result.stderr
    assert "agents of a game): envs_per_actor 10" in result.stdout + result.stderr
    assert float(training.newest_figures(tmp_path / "run")["mean_episode_step"]) < 5


def test_whole_games_are_played_in_evaluation():
    flags = TrainingFlags(env=f"{GAMES}:relay")
    torch.manual_seed(0)
    with Player(flags, num_episodes=3, seed=0) as player:
        episodes = sorted(player.play())
    # Of each of the three games, the episode of each agent.
    assert episodes == [(6.0, 3, "a")] * 3 + [(15.0, 5, "b")] * 3


def test_a_test_names_the_agents_beside_their_returns(tmp_path, capsys):
    args = ("--env", f"{GAMES}:relay", "--savedir", str(tmp_path), "--xpid", "run", "--seed", "3")
    flags = parse(monobeast.Flags, args)
    spec = look_at(flags.env_options, flags.envs_per_actor)
    learner = build_learner(flags, spec, torch.device("cpu"))
    flags.rundir.mkdir()
    save(flags.rundir / FILE_NAME, learner, flags, spec)
    assert len(evaluate(parse(monobeast.Flags, [*args, "--mode", "test"]))) == 20
    lines = capsys.readouterr().out.splitlines()
    assert "Episode 1 (a): return 6.00 in 3 steps" in lines
    assert lines[-3:] == [
        "Mean return of a over 10 episodes: 6.00",
        "Mean return of b over 10 episodes: 15.00",
        "Mean return over 20 episodes: 10.50",
    ]


@pytest.mark.slow
@pytest.mark.timeout(training.TIMEOUT_S + 60)
def test_agents_learn_what_pays_all_of_them(tmp_path):
    args = ("--env", f"{GAMES}:Signs", "--log_interval_s", "1", "--total_steps", "300000")
    training.learn("polybeast", tmp_path, 4.5, *args)  # of 5; at random 1.7
