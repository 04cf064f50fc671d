"""Numbers in `info` at the end of an episode, from wherever the environment is to the logs."""

import math

import gymnasium
import numpy as np
import pytest

import torchbeast
from libtorchbeast import episode_info
from libtorchbeast.episode_info import MAX_NAMES, add_info, add_sums, info_of
from libtorchbeast.groups import Group
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.handshake import Refused
from libtorchbeast.rpc.step_messages import StepReader, encode_step
from libtorchbeast.shared_lanes import Lane
from libtorchbeast.specs import ArraySpec
from libtorchbeast.sync_envs import SyncEnvs
from tests.helpers.counting import NUM_ACTIONS
from tests.helpers.remote import learner
from tests.helpers.threads import wait_until
from torchbeast.core.stats import RunningStats
from torchbeast.envs.vector import VectorEnvs
from torchbeast.run.flags import TrainingFlags

SPEC = Spec(ArraySpec("float32", (3,)))


def numbers_in(info):
    """What one episode adds to sums that are empty."""
    sums = {}
    add_info(sums, info)
    return {name: total for name, (total, _) in sums.items()}


class Scored(gymnasium.Env):
    """Ends after three steps: by turns a true end and a time limit."""

    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self):
        self.num_episodes = -1

    def reset(self, *, seed=None, options=None):
        self.num_episodes += 1
        self.time = 0
        return np.zeros(3, np.float32), {"score": 1000.0}

    def step(self, action):
        self.time += 1
        is_over, is_true_end = self.time == 3, self.num_episodes % 2 == 0
        info = {"is_success": is_true_end, "score": float(self.num_episodes), "time": "late"}
        return np.zeros(3, np.float32), 1.0, is_over and is_true_end, is_over, info


def test_numbers_of_any_kind_are_found_and_nothing_else():
    info = {
        "is_success": np.bool_(True),
        "score": np.float32(2.5),
        "lives": 3,
        "array": np.array([7]),
        "episode": {"r": 1.0, "l": 5, "t": 0.1, "coins": 4},
        "final_info": {"distance": 0.5, "terminal_observation": np.zeros(3)},
        "nan": math.nan,
        "huge": 10**400,
        "large": -1e31,
        "text": "7",
        "none": None,
        "many": np.zeros(2),
        "words": np.array(["a"]),
        "new\nline": 1,
        "x" * 49: 1,
        5: 1,
    }
    assert numbers_in(info) == {
        "is_success": 1.0,
        "score": 2.5,
        "lives": 3.0,
        "array": 7.0,
        "episode/coins": 4.0,
        "distance": 0.5,
    }
    assert numbers_in(None) == {}


def test_numbers_in_dicts_have_joined_names():
    info = {
        "reward_terms": {"speed": 1.5, "energy": {"left": np.float32(-0.5)}},
        "final_info": {"reward_terms": {"fall": 2}, "episode": {"r": 3.0, "coins": 4}},
        "sums": {0: 1.0, "x" * 48: 1.0},
        "deep": {"a": {"b": {"c": {"d": 1.0}}}},
    }
    assert numbers_in(info) == {
        "reward_terms/speed": 1.5,
        "reward_terms/energy/left": -0.5,
        "reward_terms/fall": 2.0,
        "episode/coins": 4.0,
    }
    info["itself"] = info
    assert len(episode_info._split(info)[0]) < 100


def test_what_cannot_be_logged_is_named_once(caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(episode_info, "_left_out", episode_info._LeftOut())
    info = {
        "score": 1.0,
        "map": np.zeros((2, 3)),
        "who": {"name": "x", "age": 5},
        "ratio": math.nan,
        "action_mask": np.ones(4),
        "none": None,
    }
    sums = {}
    for _ in range(3):
        add_info(sums, info)
    expected = (
        "Only single finite numbers in `info` are logged, and not: map (array of shape [2, 3]), "
        "who/name (str), ratio (not a finite number)."
    )
    assert caplog.messages == [expected]
    assert sums == {"score": (3.0, 3), "who/age": (15.0, 3)}
    add_info(sums, {f"name {i}": i for i in range(MAX_NAMES + 9)})
    assert caplog.messages[1].endswith(
        "name 36 (more than 32 names), name 37 (more than 32 names), 3 more."
    )
    sums = {}
    add_info(sums, {"many": {f"{i}": i for i in range(MAX_NAMES)}, "is_success": True})
    assert "is_success" in sums
    for i in range(9):
        add_info(sums, {f"text {i}": "x"})
    assert len(caplog.messages) == episode_info.MAX_REPORTS


def test_names_are_few():
    sums = {}
    for i in range(100):
        add_info(sums, {f"name {i}": i, "name 0": 1})
    assert len(sums) == MAX_NAMES
    assert sums["name 0"] == (100.0, 100)


@pytest.mark.parametrize("knows_truncation", [True, False])
def test_the_last_step_of_each_episode_is_summed(knows_truncation):
    group = Group(lambda _: SyncEnvs(Scored, 2, knows_truncation=knows_truncation), seed=0)
    group.start()
    for _ in range(2):
        group.step(np.zeros(2, np.int64))
    assert group.take_info() == {}
    for _ in range(4):
        group.step(np.zeros(2, np.int64))
    # Of each environment the episodes 0, a success, and 1.
    assert group.take_info() == {"is_success": (2.0, 4), "score": (2.0, 4)}
    assert group.take_info() == {}


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_vector_environments_sum_theirs(mode):
    envs = VectorEnvs(gymnasium.vector.SyncVectorEnv([Scored] * 2, autoreset_mode=mode), seed=0)
    envs.reset()
    for _ in range(7):
        envs.step(np.zeros(2, np.int64))
    assert envs.take_info() == {"is_success": (2.0, 4), "score": (2.0, 4)}
    assert envs.take_info() == {}


class Reused(Scored):
    """Has one dict for all that it says."""

    def __init__(self):
        super().__init__()
        self.info = {}

    def reset(self, **options):
        frame, _ = super().reset(**options)
        self.info["score"] = -1.0
        return frame, self.info

    def step(self, action):
        *result, info = super().step(action)
        self.info.update(info)
        return *result, self.info


def test_an_info_that_is_used_again_is_read_before_the_reset():
    sums = []
    for env_class in (Scored, Reused):
        group = Group(lambda _, env_class=env_class: SyncEnvs(env_class, 1), seed=0)
        group.start()
        for _ in range(6):
            group.step(np.zeros(1, np.int64))
        sums.append(group.take_info()["score"])
    assert sums[0] == sums[1]


def test_a_final_info_may_have_no_mask():
    finals = {"coins": np.array([3, 4])}
    assert numbers_in(info_of({"final_info": finals}, 1)) == {"coins": 4.0}
    assert numbers_in(info_of({"final_info": [None, {"coins": 4}]}, 1)) == {"coins": 4.0}
    assert numbers_in(info_of({"final_info": [None, {"coins": 4}]}, 0)) == {}


def test_of_a_vectors_info_each_environment_has_its_part():
    info = {
        "score": np.array([1.0, 2.0]),
        "_score": np.array([False, True]),
        "final_info": {"coins": np.array([3, 4]), "_coins": np.array([True, True])},
        "_final_info": np.array([True, False]),
    }
    assert numbers_in(info_of(info, 0)) == {"coins": 3.0}
    assert numbers_in(info_of(info, 1)) == {"score": 2.0}


# --- On the way -------------------------------------------------------------------------------


def test_a_lane_keeps_sums_and_ignores_what_is_no_name_or_number():
    lane = Lane.create(SPEC, 2)
    other = Lane(lane.fd, SPEC, 2)  # as the learner maps it
    for i in range(3):
        lane.add_info({"score": (float(i), 1), "wins": (2.0, 2)})
    assert other.read_info() == {"score": (3.0, 3), "wins": (6.0, 6)}
    lane.add_info({f"name {i}": (1.0, 1) for i in range(MAX_NAMES)})
    assert len(other.read_info()) == MAX_NAMES
    lane._header["infos"]["name"][0] = b"\xff\x07"
    lane._header["infos"]["total"][1] = math.nan
    assert other.read_info() is other.read_info()
    third = Lane(lane.fd, SPEC, 2)
    assert set(third.read_info()) == {f"name {i}" for i in range(MAX_NAMES - 2)}


def first_row(num_envs):
    row = {name: np.zeros(num_envs, dtype) for name, dtype in
           (("reward", np.float32), ("done", bool), ("truncated", bool),
            ("episode_step", np.int32), ("episode_return", np.float32))}  # fmt: skip
    row["done"][:] = True
    return {**row, "frame": np.zeros((num_envs, 3), np.float32)}


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_message_brings_them(num_envs):
    lane = Lane.create(SPEC, num_envs)
    reader = StepReader(SPEC, num_envs, lane.rows)
    info = {f"name {i}": (i / 2, 1) for i in range(MAX_NAMES)}
    reader.read(encode_step(first_row(num_envs), info))
    assert reader.info == info
    reader.read(encode_step(first_row(num_envs)))
    assert reader.info == {}


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        ({"score": (math.nan, 1)}, "finite float32, got nan"),
        ({"score": (1e300, 1)}, "finite float32"),
        ({"score": (1.0, 4)}, "count must be from 1 to 3, got 4"),
        ({"score": (1.0, 0)}, "count must be from 1 to 3, got 0"),
        ({"new\nline": (1.0, 1)}, "1 to 48 printable bytes"),
        ({"x" * 49: (1.0, 1)}, "1 to 48 printable bytes"),
        ({f"name {i}": (1.0, 1) for i in range(MAX_NAMES + 1)}, "32 infos, got 33"),
    ],
)
def test_a_message_with_bad_ones_is_refused(info, complaint):
    lane = Lane.create(SPEC, 3)
    with pytest.raises(Refused, match=complaint):
        StepReader(SPEC, 3, lane.rows).read(encode_step(first_row(3), info))
    assert lane.read_info() == {}


@pytest.mark.parametrize("kind", ["lane", "stream"])
def test_a_simulators_numbers_reach_the_learner(kind, tmp_path):
    listen = f"unix:{tmp_path}/learner" if kind == "lane" else "127.0.0.1:0"
    frame, sums = np.zeros(3, np.float32), {}
    with (
        learner(listen=[listen]) as it,
        torchbeast.connect(it.address, num_actions=NUM_ACTIONS) as actor,
    ):
        actor.step(frame)
        for i in range(4):
            actor.step(frame, info={"score": 1000.0})  # in the middle of an episode
            actor.step(frame, done=True, info={"score": float(i), "name": "x"})
            actor.step(frame, done=True, final_observation=frame, info={"score": float(i)})

        def have_come():
            add_sums(sums, it.pool.take_info())
            return sums.get("score", (0, 0))[1] == 8

        wait_until(have_come)
        assert sums == {"score": (12.0, 8)}
        assert it.pool.take_info() == {}


# --- In the logs ------------------------------------------------------------------------------


def test_figures_are_means_over_the_last_hundred_episodes():
    stats = RunningStats()
    stats.add_info({"score": (1000.0, 1)})
    stats.add_info({"score": (10.0, 10), "wins": (1.0, 4)})
    assert stats.summary()["info/score"] == pytest.approx(1010 / 11)
    for _ in range(9):
        stats.add_info({"score": (20.0, 10)})
    assert stats.summary()["info/score"] == pytest.approx(190 / 100)
    assert stats.latest()["info/wins"] == 0.25
    again = RunningStats()
    again.load_state_dict(stats.state_dict())
    assert again.summary() == stats.summary()


def test_the_flag_chooses_what_is_logged():
    info = {"score": (1.0, 1), "is_success": (0.0, 1)}
    choose = {
        text: set(TrainingFlags(env="Catch", log_info=text).choose_info(info))
        for text in ("all", "none", "score", "is_success, score,other")
    }
    assert choose == {
        "all": set(info),
        "none": set(),
        "score": {"score"},
        "is_success, score,other": set(info),
    }
