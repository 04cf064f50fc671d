"""Single environments as a group: the rows they give, both styles of Gym, and those that fail."""

import logging

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from libtorchbeast.groups import HEALTHY_STEPS, HEARTBEAT, MAX_REBUILDS, Broken, describe_failure
from libtorchbeast.observations import FrameCheck, NumberRange
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import INT64, ArraySpec, discrete, spec_of, spec_of_space
from libtorchbeast.sync_envs import SyncEnvs
from libtorchbeast.tree import leaves_of


class Counting(gymnasium.Env):
    """The frame is the time; an episode ends after `length` steps, by its end or by a limit."""

    def __init__(self, length=1000, limit=False):
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
    rows = [envs.reset(), *(envs.step(np.full(envs.num_envs, action)) for action in actions)]
    names = ("reward", "done", "truncated", "episode_step", "episode_return", "last_action")
    return [(float(r["frame"][0, 0]), *(r[name][0].item() for name in names)) for r in rows]


# ------------------------------------------------------------------------------------------ rows


def test_a_true_end_needs_no_extra_row():
    envs = SyncEnvs(lambda: Counting(3, limit=False), num_envs=2)
    assert play(envs, [0, 1, 0, 1]) == [
        # frame, reward, done, truncated, episode_step, episode_return, last_action
        (0.0, 0.0, True, False, 0, 0.0, 0),
        (1.0, 10.0, False, False, 1, 10.0, 0),
        (2.0, 11.0, False, False, 2, 21.0, 1),
        (0.0, 10.0, True, False, 3, 31.0, 0),
        (1.0, 11.0, False, False, 1, 11.0, 1),
    ]


def test_a_time_limit_shows_the_final_frame_then_one_extra_row():
    envs = SyncEnvs(lambda: Counting(3, limit=True), num_envs=2)
    assert play(envs, [0, 1, 0, 1, 1]) == [
        (0.0, 0.0, True, False, 0, 0.0, 0),
        (1.0, 10.0, False, False, 1, 10.0, 0),
        (2.0, 11.0, False, False, 2, 21.0, 1),
        (3.0, 10.0, False, False, 3, 31.0, 0),  # an ordinary row with the true final frame
        (0.0, 0.0, True, True, 3, 31.0, 1),  # the transition into it did not happen
        (1.0, 11.0, False, False, 1, 11.0, 1),
    ]


def test_the_heartbeat_goes_on_while_environments_are_made_and_reset_one_by_one():
    """Each may take its time, all together more than the watchdog waits."""
    said = []

    class Slow(Counting):
        def __init__(self):
            said.append("made")
            super().__init__()

        def reset(self, **kwargs):
            said.append("reset")
            return super().reset(**kwargs)

    before = HEARTBEAT.set(lambda: said.append("beat"))
    try:
        SyncEnvs(Slow, num_envs=2).reset()
    finally:
        HEARTBEAT.reset(before)
    assert said == ["beat", "made"] * 2 + ["beat", "reset"] * 2


def test_an_end_at_the_time_limit_is_an_end():
    class Both(Counting):
        def step(self, action):
            frame, reward, over, _, info = super().step(action)
            return frame, reward, over, over, info

    rows = play(SyncEnvs(lambda: Both(2), num_envs=1), [0, 0, 0])
    assert [row[2] for row in rows] == [True, False, True, False]
    assert not any(row[3] for row in rows)


def test_without_truncation_a_time_limit_is_an_end_like_any_other():
    envs = SyncEnvs(lambda: Counting(2, limit=True), num_envs=1, knows_truncation=False)
    rows = play(envs, [0, 0, 0, 0])
    assert [row[0] for row in rows] == [0, 1, 0, 1, 0]
    assert [row[2] for row in rows] == [True, False, True, False, True]
    assert not any(row[3] for row in rows)
    assert [row[4] for row in rows] == [0, 1, 2, 1, 2]
    assert [row[5] for row in rows] == [0, 10, 20, 10, 20]


def test_environments_of_a_group_end_on_their_own():
    lengths = iter([2, 3])
    envs = SyncEnvs(lambda: Counting(next(lengths)), num_envs=2)
    envs.reset()
    done = np.stack([envs.step(np.zeros(2, np.int64))["done"] for _ in range(6)])
    assert done[:, 0].tolist() == [False, True, False, True, False, True]
    assert done[:, 1].tolist() == [False, False, True, False, False, True]


def test_a_second_reset_forgets_counts_and_time_limits():
    envs = SyncEnvs(lambda: Counting(2, limit=True), num_envs=1)
    first = play(envs, [0, 0])
    assert play(envs, [0, 0, 0])[:3] == first


def test_every_environment_needs_its_action():
    envs = SyncEnvs(Counting, num_envs=2)
    envs.reset()
    with pytest.raises(ValueError, match="must be 2 actions, got 3"):
        envs.step(np.zeros(3, np.int64))


def test_environments_are_all_closed_also_if_one_fails():
    closed = []

    class Noisy(Counting):
        def close(self):
            closed.append(self)
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        SyncEnvs(Noisy, num_envs=3).close()
    assert len(closed) == 3


def test_environments_made_before_one_that_cannot_be_made_are_closed():
    closed = []

    class Scarce(Counting):
        num_made = 0

        def __init__(self):
            super().__init__()
            if Scarce.num_made == 2:
                raise OSError("no licence is left")
            Scarce.num_made += 1

        def close(self):
            closed.append(self)

    with pytest.raises(OSError, match="no licence is left"):
        SyncEnvs(Scarce, num_envs=3)
    assert len(closed) == 2


# ---------------------------------------------------------------------------- both styles of Gym


class OldStyle:
    """Episodes of two steps; an action of 1 ends them by a time limit. It has no spaces."""

    def __init__(self):
        self.actions = []

    def reset(self):
        self.time = 0.0
        return np.zeros(1)

    def step(self, action):
        self.actions.append(action)
        self.time += 1
        return np.full(1, self.time), 1.0, self.time == 2, {"TimeLimit.truncated": action == 1}


class OldStyleWithSpaces(OldStyle):
    action_space = spaces.Discrete(2)


@pytest.mark.parametrize("make_env", [OldStyle, OldStyleWithSpaces])
def test_old_gym_environments_fit_and_their_limits_are_recognised(make_env):
    envs = SyncEnvs(make_env, num_envs=1)
    rows = play(envs, [0, 0, 1, 1, 0])
    assert [(frame, done, cut) for frame, _, done, cut, *_ in rows] == [
        (0.0, True, False),
        (1.0, False, False),
        (0.0, True, False),
        (1.0, False, False),
        (2.0, False, False),
        (0.0, True, True),
    ]
    assert envs.action_spec == (discrete(2) if make_env is OldStyleWithSpaces else INT64)
    assert all(isinstance(action, np.int64) for action in envs.envs[0].actions)
    envs.close()  # though there is no such method


def test_old_environments_may_return_no_info():
    class Silent(OldStyle):
        def step(self, action):
            return np.zeros(1), 1.0, True, None

    assert play(SyncEnvs(Silent, num_envs=1), [0])[1][2:4] == (True, False)


class NewStyleWithoutGymnasium:
    """As in the last versions of Gym, whose environments are not Gymnasium's."""

    action_space = spaces.Discrete(2)

    def reset(self, **kwargs):
        self.seed_of_reset = kwargs.get("seed")
        return np.zeros(1), {}

    def step(self, action):
        return np.ones(1), 1.0, False, False, {}


def test_environments_of_the_new_style_need_not_be_gymnasiums():
    envs = SyncEnvs(NewStyleWithoutGymnasium, num_envs=2, seed=3)
    assert play(envs, [0])[1][:3] == (1.0, 1.0, False)
    assert [env.seed_of_reset for env in envs.envs] == [derive_seed(3, 0), derive_seed(3, 1)]


def test_old_environments_are_seeded_once():
    class Seeded(OldStyle):
        seeds: list[int] = []  # noqa: RUF012

        def seed(self, seed):
            self.seeds.append(seed)

    play(SyncEnvs(Seeded, num_envs=2, seed=3), [0, 0, 0])
    assert Seeded.seeds == [derive_seed(3, 0), derive_seed(3, 1)]


def test_old_environments_may_take_no_seed():
    class AsProcgen(OldStyle):
        def seed(self):
            raise AssertionError("It takes none, and is not called.")

    assert play(SyncEnvs(AsProcgen, num_envs=1, seed=3), [0, 0])[1][1] == 1.0


def test_one_a_process_is_said_with_the_flags_for_it():
    class OneAProcess(OldStyle):
        num_made = 0

        def __init__(self):
            OneAProcess.num_made += 1
            if OneAProcess.num_made > 1:
                raise RuntimeError("Cannot create multiple emulator instances per process")

    with pytest.raises(RuntimeError) as caught:
        SyncEnvs(OneAProcess, num_envs=4)
    report = describe_failure(caught.value)
    assert "1 could be made in this process" in report
    assert "--envs_per_actor 1" in report


class FirstStepsFail(OldStyleWithSpaces):
    num_failures = 1

    def step(self, action):
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise ValueError("not enough values to unpack")
        return super().step(action)


def test_a_first_step_that_never_works_is_an_error_and_one_that_does_is_not():
    class NoStepWorks(FirstStepsFail):
        num_failures = 100

    class FirstThreeFail(FirstStepsFail):
        num_made = 0

        def __init__(self):
            super().__init__()
            FirstThreeFail.num_made += 1
            self.num_failures = FirstThreeFail.num_made <= 3
            self.is_broken = False

        def reset(self):
            assert not self.is_broken
            return super().reset()

        def step(self, action):
            self.is_broken = True  # unless that works
            result = super().step(action)
            self.is_broken = False
            return result

    envs = SyncEnvs(FirstThreeFail, num_envs=1)
    envs.reset()
    envs.try_step()
    envs = SyncEnvs(NoStepWorks, num_envs=1)
    envs.reset()
    with pytest.raises(ValueError, match="not enough values"):
        envs.try_step()


def test_gymnasiums_environments_get_pythons_integers():
    class Picky(Counting):
        def step(self, action):
            assert type(action) is int
            return super().step(action)

    envs = SyncEnvs(Picky, num_envs=2, rebuild=False)
    envs.reset()
    for dtype in (np.int64, np.int32, np.uint8, np.float32):  # whatever the agent answers
        assert envs.step(np.ones(2, dtype))["last_action"].dtype == np.int64


def test_actions_may_be_trees():
    class Pilot(Counting):
        def __init__(self):
            super().__init__()
            aim = spaces.Box(-1, 1, (2,), np.float32)
            self.action_space = spaces.Dict({"aim": aim, "move": spaces.Discrete(4)})

        def step(self, action):
            assert action["aim"].shape == (2,)
            return np.array([action["move"]], np.float32), 0.0, False, False, {}

    envs = SyncEnvs(Pilot, num_envs=2, rebuild=False)
    assert envs.reset()["last_action"]["aim"].shape == (2, 2)
    row = envs.step({"aim": np.zeros((2, 2), np.float32), "move": np.array([2, 3])})
    assert row["frame"].tolist() == [[2], [3]]
    assert row["last_action"]["move"].tolist() == [2, 3]


# ---------------------------------------------------------------------------------- observations


class Nested(OldStyle):
    """All kinds of arrays, in pieces."""

    def reset(self):
        self.time = 0.0
        backwards = np.arange(12, dtype=np.int16).reshape(3, 4).T[::-1]  # not contiguous
        return {"blstats": backwards, "pair": (np.int64(7), [np.full(2, 0.5), True])}

    def step(self, action):
        return self.reset(), 1.0, False, {}


@pytest.mark.parametrize("knows_truncation", [True, False])
def test_nested_observations_keep_their_dtypes_and_values(knows_truncation):
    envs = SyncEnvs(Nested, num_envs=2, knows_truncation=knows_truncation)
    for row in (envs.reset(), envs.step(np.zeros(2, np.int64))):
        frame = row["frame"]
        expected = np.arange(12).reshape(3, 4).T[::-1]
        np.testing.assert_array_equal(frame["blstats"], [expected, expected])
        assert spec_of(frame) == {
            "blstats": ArraySpec("int16", (4, 3)),
            "pair": (ArraySpec("int64"), [ArraySpec("float64", (2,)), ArraySpec("bool")]),
        }


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ({"vector": np.zeros(5, np.float32)}, "`vector` must be float32[4], got float32[5]."),
        ({"vector": np.zeros(4, np.float64)}, "`vector` must be float32[4], got float64[4]."),
        (
            {"vector": np.full(4, np.nan, np.float32)},
            "`vector` must be from -1e+09 to 1e+09, got nan;",
        ),
        ({"vector": np.full(4, -np.inf, np.float32)}, "must be from -1e+09 to 1e+09, got -inf;"),
        ({"vector": np.float32([0, 0, 2e9, 0])}, "must be from -1e+09 to 1e+09, got 2e+09;"),
        ({"vector": {"a": np.zeros(4)}}, "`vector/a` was not in the first one."),
        ({}, "`vector` is missing."),
        (np.zeros(4, np.float32), "The observation was not in the first one."),
    ],
)
def test_what_is_wrong_with_an_observation_is_said_with_its_name(frame, message):
    check = FrameCheck()
    check({"vector": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"^The observation") as info:
        check(frame)
    assert message in str(info.value)


def test_an_observation_of_no_numbers_is_refused():
    with pytest.raises(ValueError, match="`text` must hold numbers, got the dtype <U5"):
        FrameCheck()({"text": np.array("hello")})


def test_a_sequence_in_the_place_of_a_dict_is_another_structure():
    check = FrameCheck()
    check({"0": np.zeros(1)})
    with pytest.raises(ValueError, match="nested as the first one was"):
        check([np.zeros(1)])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (3,), (5, 5), (40, 40), (0,)])
def test_floats_must_be_numbers_of_at_most_1e9(dtype, shape):
    floats = NumberRange.of(ArraySpec(np.dtype(dtype).name, shape))
    largest = min(float(np.finfo(dtype).max), 1e9)
    for value in (0.0, 1.5, largest, -largest):  # whose sums and squares overflow
        assert floats.holds(np.full(shape, value, dtype))
        assert floats.holds(np.full((4, *shape), value, dtype)[::2])
    too_large = [] if dtype == np.float16 else [np.nextafter(dtype(1e9), dtype(np.inf))]
    for value in (np.inf, -np.inf, np.nan, *too_large):
        array = np.ones((2, *shape), dtype)
        array[1:] = value
        assert floats.holds(array) == (array.size == 0)
    for mixed in ([np.inf, -np.inf, 1], [1, np.nan, 1], [np.nan, 1, 1]):
        assert not floats.holds(np.array(mixed, dtype))


@pytest.mark.parametrize(
    ("space", "good", "bad", "sentence"),
    [
        (spaces.Discrete(3), 2, 3, "the categories 0 to 2, got 3;"),
        (spaces.Discrete(3, start=-1), -1, 2, "the categories -1 to 1, got 2;"),
        (spaces.MultiDiscrete([2, 3]), [1, 2], [2, 1], "the categories 0 to 1, got 2;"),
        (spaces.MultiDiscrete([[5] * 9] * 9), [[4] * 9] * 9, [[-1] * 9] * 9, "0 to 4, got -1;"),
        (spaces.MultiBinary(2), [1, 0], [1, 2], "the categories 0 to 1, got 2;"),
    ],
)
def test_categories_of_an_observation_must_be_those_of_its_space(space, good, bad, sentence):
    """A table with a row for each, such as PyTorch's Embedding, has no row for others."""
    check = FrameCheck(lambda: spec_of_space(space))
    dtype = space.dtype
    check(np.asarray(good, dtype))
    with pytest.raises(ValueError, match="The observation must be one of") as info:
        check(np.asarray(bad, dtype))
    assert sentence in str(info.value)
    categories = NumberRange.of(spec_of_space(space))
    assert categories.holds(np.asarray([good, good], dtype))
    assert not categories.holds(np.asarray([good, bad], dtype))


def test_quantities_may_exceed_what_their_space_says():
    check = FrameCheck(lambda: spec_of_space(spaces.Box(0, 5, (2,), np.int32)))
    check(np.array([9, -9], np.int32))


# --------------------------------------------------------------------------- those that fail


class Failing(Counting):
    """One of them, `who`, fails in step `at`; `how` says in which way."""

    made: list["Failing"]

    def __init__(self, how, at=3, who=1):
        super().__init__()
        self.how, self.at, self.who = how, at, who
        self.number = len(self.made)
        self.made.append(self)
        self.seed_of_reset = None
        self.is_closed = False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.seed_of_reset = seed
        if self.how == "reset" and self.number == self.who and hasattr(self, "_time"):
            raise RuntimeError("cannot reset")
        return super().reset(seed=seed)

    def step(self, action):
        frame, reward, over, limit, info = super().step(action)
        if self.number != self.who or self._time != self.at:
            return frame, reward, over, limit, info
        if self.how == "raise":
            raise RuntimeError("the wheel came off")
        return {
            "reset": (frame, reward, True, False, info),
            "limit": (frame, reward, False, True, info),
            "four values": (frame, reward, over, info),
            "shape": (np.zeros(2, np.float32), reward, over, limit, info),
            "dtype": (frame.astype(np.int32), reward, over, limit, info),
            "nan": (np.full_like(frame, np.nan), reward, over, limit, info),
            "inf reward": (frame, float("inf"), over, limit, info),
            "nan reward": (frame, np.float32("nan"), over, limit, info),
            "huge": (np.full_like(frame, 1e10), reward, over, limit, info),
            "huge reward": (frame, 1e10, over, limit, info),
            "no reward": (frame, None, over, limit, info),
        }[self.how]

    def close(self):
        self.is_closed = True
        raise RuntimeError("it does not even close")


FAILURES = [
    "raise",
    "reset",
    "four values",
    "shape",
    "dtype",
    "nan",
    "huge",
    "inf reward",
    "nan reward",
    "huge reward",
    "no reward",
]


@pytest.fixture
def made():
    Failing.made = []
    return Failing.made


@pytest.mark.parametrize("how", FAILURES)
def test_an_environment_that_fails_is_rebuilt_and_its_neighbours_go_on(how, made, caplog):
    envs = SyncEnvs(lambda: Failing(how), num_envs=3, seed=5)
    rows = [envs.reset(), *(envs.step(np.zeros(3, np.int64)) for _ in range(5))]
    for i in (0, 2):
        assert [row["episode_step"][i] for row in rows] == [0, 1, 2, 3, 4, 5]
        assert [row["episode_return"][i] for row in rows] == [0, 10, 20, 30, 40, 50]
        assert [row["frame"][i, 0] for row in rows] == [0, 1, 2, 3, 4, 5]
        assert not any(row["done"][i] or row["truncated"][i] for row in rows[1:])
    assert [row["episode_step"][1] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["episode_return"][1] for row in rows] == [0, 10, 20, 0, 10, 20]
    assert [row["reward"][1] for row in rows] == [0, 10, 10, 0, 10, 10]
    assert [row["frame"][1, 0] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [bool(row["done"][1]) for row in rows] == [True, False, False, True, False, False]
    assert [bool(row["truncated"][1]) for row in rows] == [False] * 3 + [True] + [False] * 2
    assert [env.is_closed for env in made] == [False, True, False, False]
    assert [env.seed_of_reset for env in made] == [
        *(derive_seed(5, i) for i in range(3)),
        derive_seed(5, 1, 1),
    ]
    assert "Environment 1 failed and is rebuilt with a new seed." in caplog.messages


def test_an_environment_may_fail_after_its_time_limit(made):
    class FailsAfterLimit(Failing):
        def reset(self, *, seed=None, options=None):
            if self.number == 1 and seed is None:
                raise RuntimeError("cannot reset")
            return super().reset(seed=seed)

    envs = SyncEnvs(lambda: FailsAfterLimit("limit"), num_envs=2, seed=5)
    envs.reset()
    rows = [envs.step(np.zeros(2, np.int64)) for _ in range(6)]
    assert [bool(row["truncated"][1]) for row in rows] == [False, False, False, True, False, False]
    assert [row["episode_step"][1] for row in rows] == [1, 2, 3, 0, 1, 2]
    assert [row["episode_step"][0] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_an_environment_that_fails_at_once_again_and_again_is_broken():
    class Hopeless(Counting):
        num_made = 0

        def __init__(self):
            super().__init__()
            Hopeless.num_made += 1

        def step(self, action):
            raise RuntimeError("the wheel came off")

    envs = SyncEnvs(Hopeless, num_envs=1)
    envs.reset()
    for _ in range(MAX_REBUILDS):
        assert envs.step(np.zeros(1, np.int64))["truncated"].all()
    with pytest.raises(Broken, match=r"Environment 0 .* RuntimeError: the wheel came off") as info:
        envs.step(np.zeros(1, np.int64))
    assert isinstance(info.value.__cause__, RuntimeError)
    assert Hopeless.num_made == 1 + MAX_REBUILDS


def test_an_environment_that_fails_now_and_then_is_not_broken():
    class Moody(Counting):
        def step(self, action):
            if self._time == HEALTHY_STEPS:
                raise RuntimeError("not today")
            return super().step(action)

    envs = SyncEnvs(Moody, num_envs=1)
    envs.reset()
    cuts = [envs.step(np.zeros(1, np.int64))["truncated"][0] for _ in range(10 * HEALTHY_STEPS)]
    assert sum(cuts) == 9


@pytest.mark.parametrize("where", ["make", "reset"])
def test_rebuilding_may_fail_a_few_times(where):
    class Flaky(Counting):
        num_made = 0
        num_good = 0

        def __init__(self):
            Flaky.num_made += 1
            self.is_first = Flaky.num_made == 1
            self.is_good = self.is_first or Flaky.num_made > self.num_good
            if where == "make" and not self.is_good:
                raise RuntimeError("no licence is left")
            super().__init__()

        def reset(self, *, seed=None, options=None):
            if not self.is_good:
                raise RuntimeError("cannot start")
            return super().reset(seed=seed)

        def step(self, action):
            if self.is_first:
                raise RuntimeError("the wheel came off")
            return super().step(action)

    Flaky.num_good = MAX_REBUILDS  # the last try that is allowed works
    envs = SyncEnvs(Flaky, num_envs=1)
    envs.reset()
    assert envs.step(np.zeros(1, np.int64))["truncated"].tolist() == [True]
    assert Flaky.num_made == 1 + MAX_REBUILDS
    assert envs.step(np.zeros(1, np.int64))["episode_step"].tolist() == [1]

    Flaky.num_made, Flaky.num_good = 0, 1000
    envs = SyncEnvs(Flaky, num_envs=1)
    envs.reset()
    with pytest.raises(Broken) as info:
        envs.step(np.zeros(1, np.int64))
    assert isinstance(info.value.__cause__, RuntimeError)
    assert Flaky.num_made == 1 + MAX_REBUILDS


def test_an_environment_that_differs_from_the_first_is_broken_at_the_start():
    numbers = iter(range(100))

    class Odd(Counting):
        def __init__(self):
            super().__init__()
            self.size = 1 if next(numbers) == 0 else 2

        def reset(self, *, seed=None, options=None):
            return np.zeros(self.size, np.float32), {}

    with pytest.raises(Broken, match=r"The observation must be float32\[1\], got float32\[2\]"):
        SyncEnvs(Odd, num_envs=2).reset()


@pytest.mark.parametrize("options", [{"rebuild": False}, {"knows_truncation": False}])
def test_without_rebuilding_exceptions_reach_the_caller(options, made, caplog):
    envs = SyncEnvs(lambda: Failing("raise", at=2, who=0), num_envs=1, **options)
    envs.reset()
    envs.step(np.zeros(1, np.int64))
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="wheel came off"):
        envs.step(np.zeros(1, np.int64))
    assert len(made) == 1
    assert not caplog.records


def test_without_rebuilding_observations_are_what_they_are(made):
    envs = SyncEnvs(lambda: Failing("shape", at=1, who=0), num_envs=1, rebuild=False)
    envs.reset()
    assert envs.step(np.zeros(1, np.int64))["frame"].shape == (1, 2)


def test_seeds_of_neighbours_and_of_rebuilds_are_all_different():
    paths = [(i,) for i in range(8)] + [(i, n) for i in range(8) for n in (1, 2, 3)]
    seeds = [derive_seed(run, *path) for run in range(30) for path in paths]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_leaves_have_names():
    tree = {"b": (1, 2), "a": {"c": 3}}
    assert list(leaves_of(tree)) == [("a/c", 3), ("b/0", 1), ("b/1", 2)]


# ---------------------------------------------------------------------------------- rewards


class Paying(Counting):
    """Whose reward is whatever the test says."""

    pays: object = 1.0

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.pays, *rest


@pytest.mark.parametrize(
    "reward", [2, 2.0, np.float32(2.0), np.array(2.0), np.array([2.0]), [2.0], np.array([[2]])]
)
def test_a_reward_is_one_number_in_whatever_it_comes(monkeypatch, reward):
    monkeypatch.setattr(Paying, "pays", reward)
    envs = SyncEnvs(Paying, 1)
    envs.reset()
    assert envs.step(np.zeros(1, np.int64))["reward"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("reward", "found"), [(np.zeros(2), "2 numbers"), ([0.0, 1.0], "2 numbers"), (None, "None")]
)
def test_a_reward_that_is_not_one_number_is_told(monkeypatch, reward, found):
    monkeypatch.setattr(Paying, "pays", reward)
    envs = SyncEnvs(Paying, 1)
    envs.reset()
    for _ in range(MAX_REBUILDS):
        envs.step(np.zeros(1, np.int64))
    with pytest.raises(Broken) as broken:
        envs.step(np.zeros(1, np.int64))
    sentence = f"The reward must be one number, got {found}; wrap the environment"
    assert sentence in str(broken.value.__cause__)
