"""The rows that environments give: ends, time limits, counters; names and wrong names."""

from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces

from libtorchbeast.specs import ArraySpec, count_actions, discrete
from torchbeast.envs import EnvOptions, look_at, make_envs
from torchbeast.envs.atari import AtariEnvs, Game
from torchbeast.envs.vector import VectorEnvs
from torchbeast.errors import UsageError


class Counting(gymnasium.Env):
    """The frame is the time; an episode ends after `length` steps, by its end or by a limit."""

    def __init__(self, length, limit):
        self.observation_space = spaces.Box(0, 1000, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._limit = length, limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return np.array([0.0], np.float32), {}

    def step(self, action):
        self._time += 1
        over = self._time == self._length
        frame = np.array([self._time], np.float32)
        return frame, 10.0 + action, over and not self._limit, over and self._limit, {}


def play(envs, actions):
    """Rows of the first environment, as tuples."""
    row = envs.reset()
    rows = [row]
    for action in actions:
        rows.append(envs.step(np.full(envs.num_envs, action)))
    names = ("reward", "done", "truncated", "episode_step", "episode_return", "last_action")
    return [(float(r["frame"][0, 0]), *(r[name][0].item() for name in names)) for r in rows]


class Numbers:
    """Old Gym's style, with one of three numbers as observation."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Discrete(3, start=5)

    def reset(self):
        return 5

    def step(self, action):
        return 6 + action, 1.0, False, {}


def test_old_gym_environments_may_show_numbers():
    options = EnvOptions(f"{__name__}:Numbers")
    envs = make_envs(options, num_envs=2)
    assert envs.reset()["frame"].tolist() == [5, 5]
    assert envs.step(np.array([0, 1]))["frame"].tolist() == [6, 7]
    assert look_at(options).observation == ArraySpec("int64", (), 5, 7, categories=True)


class Tree(Counting):
    """Float64, lists and plain numbers in an observation."""

    def __init__(self):
        super().__init__(3, limit=False)

    def reset(self, *, seed=None, options=None):
        frame, info = super().reset(seed=seed)
        return {"a": frame.astype(np.float64), "b": (np.zeros((2, 2), np.uint8), 3), "c": 0.5}, info


def test_floats_anywhere_in_an_observation_have_32_bits():
    frame = make_envs(EnvOptions(f"{__name__}:Tree"), num_envs=4).reset()["frame"]
    assert (frame["a"].dtype, frame["a"].shape) == (np.float32, (4, 1))
    assert (frame["b"][0].dtype, frame["b"][0].shape) == (np.uint8, (4, 2, 2))
    assert frame["b"][1].tolist() == [3, 3, 3, 3]
    assert (frame["c"].dtype, frame["c"].tolist()) == (np.float32, [0.5] * 4)


class Shifted(Counting):
    """Its actions are 3 and 4."""

    def __init__(self):
        super().__init__(3, limit=False)
        self.action_space = spaces.Discrete(2, start=3)

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step(action)


def shifted_vector(num_envs):
    return gymnasium.vector.SyncVectorEnv([Shifted] * num_envs)


@pytest.mark.parametrize("factory", ["Shifted", "shifted_vector"])
def test_actions_that_do_not_start_at_0_are_shifted(factory):
    envs = make_envs(EnvOptions(f"{__name__}:{factory}"), num_envs=2)
    envs.reset()
    row = envs.step(np.array([0, 1]))
    assert envs.action_spec == discrete(2)
    assert row["reward"].tolist() == [13, 14]
    assert row["last_action"].tolist() == [0, 1]  # as the agent counts them


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_wide_unsigned_integers_are_seen_as_they_are(dtype):
    high = np.iinfo(dtype).max
    options = EnvOptions(
        "tests.helpers.tasks:wide_integers", env_kwargs=f'{{"dtype": "{dtype}", "high": {high}}}'
    )
    envs = make_envs(options, num_envs=8, seed=0)
    frame = envs.reset()["frame"]
    assert set(frame.ravel().tolist()) == {0, high}
    torch.zeros(3, 2, dtype=torch.from_numpy(frame).dtype)[torch.tensor([0, 1])] = 1  # or it raises
    assert look_at(options).observation.high == high


def test_one_number_may_be_an_observation():
    spec = look_at(EnvOptions("tests.helpers.tasks:one_number"))
    assert spec.observation == ArraySpec("float32", (), -1.0, 1.0)


def test_seeds_make_episodes_repeat():
    def cart_pole(seed):
        envs = make_envs(EnvOptions("CartPole-v1"), num_envs=2, seed=seed)
        return np.stack(
            [envs.reset()["frame"], *(envs.step(np.ones(2))["frame"] for _ in range(50))]
        )

    assert np.array_equal(cart_pole(3), cart_pole(3))
    assert not np.array_equal(cart_pole(3), cart_pole(4))


@pytest.mark.parametrize("env", ["CartPole-v1", f"{__name__}:cart_poles"])
def test_environments_of_neighbouring_seeds_share_no_episode(env):
    frames = []
    for seed in range(5):
        envs = make_envs(EnvOptions(env), num_envs=4, seed=seed)
        frames += [frame.tobytes() for frame in envs.reset()["frame"]]
        envs.close()
    assert len(set(frames)) == len(frames) == 20


def cart_poles(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


def test_memory_hides_the_cue_when_it_asks():
    envs = make_envs(EnvOptions("Memory"), num_envs=64, seed=0)
    row = envs.reset()
    cue = row["frame"][:, 0].copy()
    assert set(cue) == {-1.0, 1.0}
    for _ in range(4):
        row = envs.step(np.zeros(64, np.int64))
        assert (row["frame"][:, 0] == 0).all()
    assert (row["frame"] == row["frame"][0]).all()  # the question looks the same to all
    row = envs.step((cue > 0).astype(np.int64))
    assert row["done"].all()
    assert (row["reward"] == 1).all()


def test_catch_can_be_won_by_following_the_ball():
    envs = make_envs(EnvOptions("Catch"), num_envs=8, seed=0)
    row = envs.reset()
    for _ in range(9):
        ball = row["frame"][:, :-1].max(axis=1).argmax(axis=1)
        paddle = row["frame"][:, -1].argmax(axis=1)
        row = envs.step(np.sign(ball - paddle) + 1)
    assert row["done"].all()
    assert (row["episode_return"] == 1).all()


# --- Atari ------------------------------------------------------------------------------------


def play_atari(steps=2500, num_envs=2, game="breakout", episodic_life=False, **options):
    envs = AtariEnvs(Game(game, **options), num_envs, seed=1, episodic_life=episodic_life)
    rng = np.random.default_rng(0)
    rows = [envs.reset()]
    for _ in range(steps):
        rows.append(envs.step(rng.integers(count_actions(envs.action_spec), size=num_envs)))
    envs.close()
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_atari_rows_add_up_to_the_games_score():
    rows = play_atari(800)
    assert rows["frame"].shape[1:] == (2, 4, 84, 84)
    assert rows["frame"].dtype == np.uint8
    for i in range(2):
        ends = np.flatnonzero(rows["done"][:, i])[1:]
        assert len(ends) > 1
        start = 0
        for end in ends:
            score = rows["reward"][start + 1 : end + 1, i].sum()
            assert rows["episode_return"][end, i] == score
            assert rows["episode_step"][end, i] == end - start
            start = end
    assert rows["episode_return"].max() > 1


@pytest.mark.slow
def test_atari_games_of_neighbouring_seeds_share_none(monkeypatch):
    seeds = []
    reset = AtariVectorEnv.reset

    def spy(self, *, seed):
        seeds.extend(seed.tolist())
        return reset(self, seed=seed)

    monkeypatch.setattr(AtariVectorEnv, "reset", spy)
    for seed in range(3):
        envs = AtariEnvs(Game("pong"), 4, seed)
        envs.reset()
        envs.close()
    assert len(set(seeds)) == len(seeds) == 12


def test_atari_rewards_are_not_clipped():
    assert play_atari(150, game="space_invaders")["reward"].max() > 1


def test_a_lost_life_is_done_but_no_finished_episode():
    rows = play_atari(800, episodic_life=True)
    finished = rows["done"] & (rows["episode_step"] > 0)
    lost = rows["done"] & (rows["episode_step"] == 0) & ~rows["truncated"]
    assert 3 <= lost.sum() / finished.sum() <= 6  # five lives a game
    end = np.flatnonzero(finished[:, 0])[0]
    assert rows["episode_return"][end, 0] == rows["reward"][: end + 1, 0].sum()


@pytest.mark.parametrize("episodic_life", [False, True])
def test_after_a_lost_life_fire_is_pressed_for_the_agent(episodic_life):
    """Breakout waits for it, and this agent never presses it; nothing is learnt from that step."""
    envs = AtariEnvs(Game("breakout"), 1, seed=1, episodic_life=episodic_life)
    rows = [envs.reset(), *(envs.step(np.zeros(1, np.int64)) for _ in range(400))]
    envs.close()
    numbers = {name: np.stack([row[name] for row in rows])[:, 0] for name in rows[0]}
    finished = numbers["done"] & (numbers["episode_step"] > 0)
    assert finished.sum() >= 2  # games of five lives
    lost = np.flatnonzero(numbers["done"] & ~numbers["truncated"] & ~finished)[1:]
    assert (lost < np.flatnonzero(finished)[0]).sum() == (4 if episodic_life else 0)
    served = np.flatnonzero(numbers["truncated"])
    assert served.tolist() == [end + 1 for end in lost if end + 1 < len(rows)]
    assert numbers["done"][served].all()
    assert not numbers["reward"][served].any()


def test_the_rendered_game_presses_fire_after_a_lost_life():
    options = EnvOptions("BreakoutNoFrameskip-v4", episodic_life=False)
    envs = make_envs(options, 1, seed=1, render=True)
    rows = [envs.reset(), *(envs.step(np.zeros(1, np.int64)) for _ in range(250))]
    envs.close()
    assert any(row["done"][0] and row["episode_step"][0] > 0 for row in rows[1:])


class LifeGiver:
    """ALE with a game that gives two lives before its end, and begins with one."""

    def __init__(self, *args, life_loss_info=False, **kwargs):
        self.tells_lives = life_loss_info
        self.single_observation_space = spaces.Box(0, 255, (1, 2, 2), np.uint8)
        self.single_action_space = spaces.Discrete(2)
        self.ale = SimpleNamespace(get_action_set=lambda: [SimpleNamespace(name="NOOP")])
        self.time, self.began, self.lives = 0, 0, 1

    def _info(self):
        frame = np.array([4 * self.time])
        since = np.array([4 * (self.time - self.began)])
        lives = np.array([self.lives])
        return {"lives": lives, "frame_number": frame, "episode_frame_number": since}

    def reset(self, *, seed):
        return np.zeros((1, 1, 2, 2), np.uint8), self._info()

    def step(self, actions):
        self.time += 1
        age = self.time - self.began
        lost = age == 2
        self.lives = {1: 3, 2: 2, 3: 3}.get(age, self.lives)
        over = age == 4
        if over:
            self.began, self.lives = self.time, 1
        terminated = np.array([over or (lost and self.tells_lives)])
        frame = np.zeros((1, 1, 2, 2), np.uint8)
        return frame, np.ones(1), terminated, np.zeros(1, np.bool_), self._info()


@pytest.mark.parametrize("episodic_life", [False, True])
def test_games_that_end_with_more_lives_than_they_begin_with_lose_no_episode(
    monkeypatch, episodic_life
):
    monkeypatch.setattr("ale_py.vector_env.AtariVectorEnv", LifeGiver)
    envs = AtariEnvs(Game("any"), 1, episodic_life=episodic_life)
    envs.reset()
    rows = [envs.step(np.zeros(1, np.int64)) for _ in range(8)]
    finished = [row for row in rows if row["done"][0] and row["episode_step"][0] > 0]
    assert [row["episode_return"].item() for row in finished] == [4, 4]
    assert [row["done"].item() for row in rows] == [False, episodic_life, False, True] * 2


def test_an_atari_time_limit_is_a_truncation():
    rows = play_atari(150, num_envs=1, game="pong", max_episode_frames=160)
    cuts = np.flatnonzero(rows["truncated"][:, 0])
    assert len(cuts) == 3
    assert cuts[0] == 41  # 40 steps of 4 frames, then the extra row
    assert rows["done"][cuts, 0].all()
    assert (rows["reward"][cuts, 0] == 0).all()
    # The extra row is a no-op start, whose 4 frames ALE counts towards the next limit.
    assert rows["episode_step"][cuts, 0].tolist() == [40, 39, 39]
    before = rows["frame"][cuts[0] - 1, 0]
    assert np.array_equal(before[:3], rows["frame"][cuts[0] - 2, 0][1:])  # the true final frame
    assert not rows["done"][cuts - 1, 0].any()


def test_the_rendered_game_is_preprocessed_like_the_fast_one():
    options = EnvOptions("PongNoFrameskip-v4", noop_max=0, fire_reset=False)
    fast, rendered = (make_envs(options, 1, seed=0, render=render) for render in (False, True))
    a, b = fast.reset(), rendered.reset()
    for action in [0, 2, 2, 3, 3, 0, 2, 3] * 4:
        a, b = fast.step(np.array([action])), rendered.step(np.array([action]))
    # Gymnasium takes the maximum before, ALE after turning to grey: a pixel here and there differs.
    assert np.mean(np.abs(a["frame"].astype(int) - b["frame"].astype(int)) > 8) < 0.01
    assert rendered.envs[0].render().shape == (210, 160, 3)
    fast.close()
    rendered.close()


@pytest.mark.parametrize("name", ["PongNoFrameskip-v4", "ALE/Breakout-v5", "CartPole-v1", "Mock"])
def test_names_lead_to_environments(name):
    envs = make_envs(EnvOptions(name), num_envs=2)
    envs.reset()
    assert envs.step(np.zeros(2, np.int64))["reward"].shape == (2,)
    envs.close()


def test_a_factory_of_ones_own_is_found(monkeypatch, tmp_path):
    (tmp_path / "my_env.py").write_text(
        "import gymnasium\ndef build():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_envs(EnvOptions("my_env:build"), num_envs=1).reset()["frame"].shape == (1, 4)
    with pytest.raises(UsageError, match=r"did you mean build\?"):
        make_envs(EnvOptions("my_env:bild"), num_envs=1)


@pytest.mark.parametrize(
    "error",
    [
        gymnasium.error.DependencyNotInstalled("MuJoCo is not installed."),
        ModuleNotFoundError("No module named 'jax'"),
    ],
)
def test_an_environment_that_lacks_a_package_gets_one_sentence(error, monkeypatch):
    def lack():
        raise error

    spec = gymnasium.envs.registration.EnvSpec("Lacking-v0", entry_point=lack)
    monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    text = str(error).rstrip(".")
    with pytest.raises(UsageError, match=rf"Lacking-v0 cannot be made \({text}\); install"):
        make_envs(EnvOptions(spec.id), num_envs=1)


def test_other_errors_of_a_factory_stay_what_they_are(monkeypatch, tmp_path):
    (tmp_path / "my_bad_env.py").write_text("def build():\n    raise RuntimeError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="no GPU"):
        make_envs(EnvOptions("my_bad_env:build"), num_envs=1)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("PongNoFrameSkip-v4", "PongNoFrameskip-v4"),
        ("Cartpole-v1", "CartPole-v1"),
        ("catch", "Catch"),
    ],
)
def test_a_wrong_name_gets_did_you_mean(wrong, right):
    with pytest.raises(UsageError, match=f"did you mean.*{right}"):
        make_envs(EnvOptions(wrong), num_envs=1)


def test_sticky_actions_change_the_game():
    def frames(sticky):
        options = EnvOptions("PongNoFrameskip-v4", noop_max=0, sticky_actions=sticky)
        envs = make_envs(options, num_envs=1, seed=5)
        envs.reset()
        return np.stack([envs.step(np.array([2 + i % 2]))["frame"] for i in range(60)])

    assert np.array_equal(frames(0.0), frames(None))  # a -v4 id has none
    assert not np.array_equal(frames(0.0), frames(0.5))


def test_a_factory_that_takes_num_envs_makes_a_vector(tmp_path, monkeypatch):
    (tmp_path / "vectors.py").write_text(
        "import gymnasium\n"
        "def make(num_envs):\n"
        "    return gymnasium.make_vec('CartPole-v1', num_envs=num_envs)\n"
        "def wrong(num_envs):\n"
        "    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make_envs(EnvOptions("vectors:make"), num_envs=3, seed=1)
    assert isinstance(envs, VectorEnvs)
    row = envs.reset()
    assert row["frame"].shape == (3, 4)
    assert envs.step(np.zeros(3, np.int64))["frame"].dtype == np.float32
    with pytest.raises(UsageError, match=r"must return a gymnasium.vector.VectorEnv"):
        make_envs(EnvOptions("vectors:wrong"), num_envs=3)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("Crowd", r"The reward must be one number, got 2 numbers; wrap .*docs/environments.md"),
        ("FourValues", r"`step` must return \(observation, .*, info\), got 4 values; wrap"),
    ],
)
def test_a_step_that_is_none_is_refused_before_workers_start(task, sentence, capsys):
    with pytest.raises(UsageError, match=f"--env tests.helpers.tasks:{task}: {sentence}"):
        look_at(EnvOptions(f"tests.helpers.tasks:{task}"))
    assert not capsys.readouterr().out
