"""Groups as hosts step them: frames left apart, seeds, and groups that fail as a whole."""

import random
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from libtorchbeast.groups import HEALTHY_STEPS, MAX_REBUILDS, Broken, Group, make_environments
from libtorchbeast.rows import EpisodeCounter, Spec, Unstacked
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import ArraySpec, discrete, spec_of
from libtorchbeast.sync_envs import SyncEnvs
from libtorchbeast.tree import leaves_of
from torchbeast.envs import EnvOptions, make_envs, make_group

K = 3
ACTIONS = np.zeros(K, np.int64)


def play(envs, num_steps):
    return [envs.reset(), *(envs.step(np.full(K, i % 2)) for i in range(num_steps))]


# ------------------------------------------------------------------------------------ make_group


@pytest.mark.parametrize("env", ["Catch", "Mock", "CartPole-v1"])
def test_frames_left_apart_are_the_same_frames(env):
    together = play(make_envs(EnvOptions(env), K, seed=7), 30)
    apart = play(make_environments("torchbeast.envs:make_group", K, seed=7, env=env), 30)
    assert spec_of(apart[0]["frame"]) == spec_of(together[0]["frame"])
    for expected, row in zip(together, apart, strict=True):
        assert isinstance(row["frame"], Unstacked)
        assert row.keys() == expected.keys()
        for name in row:
            np.testing.assert_array_equal(np.asarray(row[name]), expected[name])


def test_each_array_of_a_tree_is_left_apart():
    class Tree:
        def reset(self):
            return {"a": np.arange(6.0).reshape(2, 3), "b": (np.zeros(2, np.uint8), 3)}

    envs = SyncEnvs(Tree, K)
    together = envs.reset()["frame"]
    envs.join = Unstacked
    apart = envs.reset()["frame"]
    assert all(isinstance(leaf, Unstacked) for _, leaf in leaves_of(apart))
    assert spec_of(apart) == spec_of(together)
    assert spec_of(apart)["a"] == ArraySpec("float64", (2, 3))
    for (_, ours), (_, theirs) in zip(leaves_of(apart), leaves_of(together), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


class Dice:
    """An environment that knows only the global generators."""

    action_space = spaces.Discrete(2)

    def __init__(self):
        self.first = random.random()

    def reset(self):
        return np.array([self.first, random.random(), np.random.rand()])


def test_the_seed_reaches_environments_that_draw_from_global_generators():
    def throw(seed):
        return np.asarray(make_group(K, seed=seed, env=f"{__name__}:Dice").reset()["frame"])

    np.testing.assert_array_equal(throw(3), throw(3))
    assert not (throw(3) == throw(4)).any()


# ----------------------------------------------------------------------------------------- Group


BOUNDED = "must be from -1e+09 to 1e+09"


class Vector:
    """A vector environment that is not Gymnasium's; it fails in step `at` if `how` says so."""

    num_envs = K
    action_spec = discrete(4)
    observation_spec: ClassVar = {"time": ArraySpec("float32", (2,)), "kind": discrete(4)}

    def __init__(self, how="", seed=0, at=3):
        self.how, self.seed, self.at = how, seed, at
        self.counter = EpisodeCounter(K)
        self.time = 0
        self.is_closed = False

    def reset(self):
        frame = {"time": np.zeros((K, 2), np.float32), "kind": np.zeros(K, np.int64)}
        return self.counter.first_row(frame)

    def step(self, actions):
        self.time += 1
        frame = np.full((K, 2), self.time, np.float32)
        kind = np.full(K, 3)
        reward = np.ones(K)
        if self.time == self.at:
            if self.how == "raise":
                raise RuntimeError("the wheel came off")
            if self.how == "nan":
                frame[1:, 1] = np.nan
            if self.how == "huge":
                frame[0, 0] = 1e10
            if self.how == "category":
                kind[2] = 4
            if self.how == "inf reward":
                reward[2] = np.inf
        no = np.zeros(K, np.bool_)
        return self.counter.row({"time": frame, "kind": kind}, reward, no, no, actions)

    def close(self):
        self.is_closed = True
        raise RuntimeError("it does not even close")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "the wheel came off"),
        ("nan", f"The observation's `time` {BOUNDED}, got nan from environment 1, 2;"),
        ("huge", f"The observation's `time` {BOUNDED}, got 1e+10 from environment 0;"),
        ("category", "`kind` must be one of the categories 0 to 3, got 4 from environment 2;"),
        ("inf reward", f"The reward {BOUNDED}, got inf from environment 2;"),
    ],
)
def test_a_vector_that_fails_is_rebuilt_as_a_whole(how, message, caplog):
    made = []

    def make(seed):
        made.append(Vector("" if made else how, seed))
        return made[-1]

    group = Group(make, seed=5)
    first = group.start()
    assert first["done"].all()
    assert not first["truncated"].any()
    assert group.spec == Spec(Vector.observation_spec, discrete(4))
    assert group.num_envs == K
    rows = [group.step(ACTIONS) for _ in range(5)]
    assert [row["episode_step"].tolist() for row in rows] == [[n] * K for n in (1, 2, 0, 1, 2)]
    assert [row["reward"].tolist() for row in rows] == [[n] * K for n in (1, 1, 0, 1, 1)]
    assert [row["done"].all() for row in rows] == [False, False, True, False, False]
    assert [row["truncated"].all() for row in rows] == [False, False, True, False, False]
    assert group.row is rows[-1]
    assert [vector.is_closed for vector in made] == [True, False]
    assert [vector.seed for vector in made] == [derive_seed(5, 0), derive_seed(5, 1)]
    assert message in caplog.text
    group.close()
    assert made[1].is_closed
    assert "failed while it was closed" in caplog.text


@pytest.mark.parametrize("where", ["make", "reset", "shape", "nan"])
def test_a_group_that_cannot_be_rebuilt_is_broken_after_a_few_tries(where):
    made = []

    class Bad(Vector):
        def reset(self):
            if where == "reset":
                raise RuntimeError("cannot start")
            value = np.nan if where == "nan" else 0.0
            size = 3 if where == "shape" else 2
            frame = {"time": np.full((K, size), value, np.float32), "kind": np.zeros(K, np.int64)}
            return self.counter.first_row(frame)

    def make(seed):
        if not made:
            made.append(Vector("raise"))
        elif where == "make":
            made.append(None)
            raise RuntimeError("no licence is left")
        else:
            made.append(Bad())
        return made[-1]

    group = Group(make, seed=5)
    group.step(ACTIONS)
    group.step(ACTIONS)
    with pytest.raises(Broken) as info:
        group.step(ACTIONS)
    texts = {
        "make": "no licence is left",
        "reset": "cannot start",
        "shape": "'time': float32[2]} as before, got {'kind': int64[], 'time': float32[3]}.",
        "nan": f"`time` {BOUNDED}, got nan from environment 0, 1, 2;",
    }
    assert texts[where] in str(info.value.__cause__)
    assert len(made) == 1 + MAX_REBUILDS
    assert where == "make" or all(vector.is_closed for vector in made)


def test_a_group_that_fails_again_and_again_is_broken():
    group = Group(lambda seed: Vector("raise", at=2), seed=5)
    cuts = [group.step(ACTIONS)["truncated"].all() for _ in range(2 * MAX_REBUILDS + 1)]
    assert sum(cuts) == MAX_REBUILDS
    with pytest.raises(Broken, match="A group of environments failed 4 times in a row"):
        group.step(ACTIONS)


def test_a_group_that_fails_now_and_then_is_not_broken():
    group = Group(lambda seed: Vector("raise", at=HEALTHY_STEPS + 1), seed=5)
    cuts = [group.step(ACTIONS)["truncated"].all() for _ in range(10 * (HEALTHY_STEPS + 1))]
    assert sum(cuts) == 10


def test_a_group_that_cannot_be_made_at_first_says_why():
    def make(seed):
        raise RuntimeError("no such game")

    with pytest.raises(RuntimeError, match="no such game"):
        Group(make, seed=5)


class Fragile(gymnasium.Env):
    """Raises in its fourth step if it is the second that was made, or if all are bad."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)
    num_made = 0
    all_bad = False

    def __init__(self):
        self.is_bad = Fragile.num_made == 1 or self.all_bad
        Fragile.num_made += 1

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.is_bad and self.time == 4:
            raise RuntimeError("the wheel came off")
        return np.full(1, self.time, np.float32), 1.0, False, False, {}


def test_in_a_group_of_single_environments_only_one_is_rebuilt(monkeypatch):
    monkeypatch.setattr(Fragile, "num_made", 0)
    options = {"env": f"{__name__}:Fragile"}
    group = Group(lambda seed: make_group(K, seed, **options), seed=5)
    steps = np.stack([group.step(ACTIONS)["episode_step"] for _ in range(6)])
    assert steps[:, 0].tolist() == steps[:, 2].tolist() == [1, 2, 3, 4, 5, 6]
    assert steps[:, 1].tolist() == [1, 2, 3, 0, 1, 2]
    assert Fragile.num_made == K + 1


def test_a_broken_environment_is_not_rebuilt_with_its_group(monkeypatch):
    monkeypatch.setattr(Fragile, "num_made", 0)
    monkeypatch.setattr(Fragile, "all_bad", True)
    group = Group(lambda seed: SyncEnvs(Fragile, 1, seed), seed=5)
    for _ in range(4 * (MAX_REBUILDS + 1) - 1):
        group.step(ACTIONS[:1])
    with pytest.raises(Broken, match="Environment 0 failed 4 times in a row"):
        group.step(ACTIONS[:1])
    assert Fragile.num_made == 1 + MAX_REBUILDS


def test_the_next_stream_starts_where_the_last_one_was_left():
    group = Group(lambda seed: Vector(), seed=5)
    group.start()
    group.step(ACTIONS)
    last = group.step(ACTIONS)
    first = group.start()
    assert first["done"].all()
    assert not first["truncated"].any()
    assert not first["episode_step"].any()
    np.testing.assert_array_equal(first["frame"]["time"], last["frame"]["time"])
    assert group.step(ACTIONS)["episode_step"].tolist() == [3] * K
