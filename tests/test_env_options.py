"""What is said of an environment on the command line: arguments, wrappers, stacks, modules."""

import subprocess
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from libtorchbeast.groups import make_environments
from torchbeast import monobeast
from torchbeast.envs import (
    GROUP_FACTORY,
    EnvOptions,
    check_env,
    describe_lives,
    look_at,
    make_envs,
)
from torchbeast.errors import UsageError
from torchbeast.run.command_line import parse
from torchbeast.run.evaluate import Video

TASKS = "tests.helpers.tasks"
ZERO = np.zeros(1, np.int64)


def shape_of(**options):
    return look_at(EnvOptions(**options)).observation.shape


def rewards(steps, **options):
    envs = make_envs(EnvOptions(**options), num_envs=1, seed=0)
    envs.reset()
    return [np.asarray(envs.step(ZERO)["reward"]).item() for _ in range(steps)]


# ---------------------------------------------------------------------------- arguments, wrappers


@pytest.mark.parametrize(
    "env", [f"{TASKS}:Corridor", f"{TASKS}:corridor", f"{TASKS}:HelpersCorridor-v0"]
)
def test_environments_get_the_arguments_that_are_given(env):
    assert shape_of(env=env) == (4,)
    assert shape_of(env=env, env_kwargs='{"size": 9}') == (9,)


def test_a_gymnasium_id_gets_arguments_and_wrappers():
    assert shape_of(env="FrozenLake-v1", env_kwargs='{"map_name": "8x8"}') == ()
    spec = look_at(EnvOptions("FrozenLake-v1", env_kwargs='{"map_name": "8x8"}'))
    assert spec.observation.num_categories == (64,)
    assert rewards(2, env="CartPole-v1", wrappers=f"{TASKS}:Doubled") == [2, 2]


def test_wrappers_are_put_on_from_the_inside_out():
    task = {"env": f"{TASKS}:Bandit"}
    assert rewards(1, **task) == [1]
    assert rewards(1, **task, wrappers=f"{TASKS}:Doubled,{TASKS}:PlusOne") == [3]
    assert rewards(1, **task, wrappers=f"{TASKS}:PlusOne, {TASKS}:Doubled") == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "Catch", "env_kwargs": "{size: 8}"}, "must be JSON such as"),
        ({"env": "Catch", "env_kwargs": "[8]"}, "must be one JSON object"),
        ({"env": "Catch", "env_kwargs": '{"size": 8}'}, "unexpected keyword argument 'size'"),
        ({"env": "CartPole-v1", "env_kwargs": '{"size": 8}'}, "unexpected keyword argument 'size'"),
        ({"env": f"{TASKS}:corridor", "env_kwargs": '{"length": 8}'}, r"takes \(size=4\), got"),
        ({"env": "Catch", "wrappers": "no.such:Wrapper"}, "no.such:Wrapper cannot be imported"),
        ({"env": "Catch", "wrappers": "gymnasium"}, "gymnasium cannot be imported"),
        ({"env": "Catch", "frame_stack": 0}, "frame_stack must be at least 1, got 0"),
        ({"env": "Catch", "noop_max": -1}, "noop_max must not be negative, got -1"),
        ({"env": "Catch", "sticky_actions": 1.5}, "sticky_actions must be from 0 to 1, got 1.5"),
        ({"env": "PongNoFrameskip-v4", "env_kwargs": '{"frameskip": 2}'}, "may have .*, got frame"),
        ({"env": "Catch", "imports": "no_such_module"}, "--import no_such_module: cannot be"),
    ],
)
def test_options_that_cannot_work_get_one_sentence(options, message):
    def check_and_make(options):
        check_env(options)
        make_envs(options, num_envs=1)

    with pytest.raises(UsageError, match=message):
        check_and_make(EnvOptions(**options))


def test_options_reach_the_processes_that_step_environments():
    """As the hosts of PolyBeast and `polybeast_env` make them, from plain arguments."""
    options = {"env": f"{TASKS}:Corridor", "env_kwargs": '{"size": 2, "goal_reward": 5}'}
    envs = make_environments(
        GROUP_FACTORY, num_envs=1, seed=0, **options, wrappers=f"{TASKS}:Doubled", frame_stack=3
    )
    assert np.asarray(envs.reset()["frame"]).shape == (1, 3, 2)
    assert [np.asarray(envs.step(ZERO)["reward"]).item() for _ in range(2)] == [0, 10]


def test_options_are_kept_with_the_run():
    args = ["--env", f"{TASKS}:Corridor", "--env_kwargs", '{"size": 6}', "--frame_stack", "2"]
    args += ["--wrappers", f"{TASKS}:Doubled", "--import", TASKS]
    saved = parse(monobeast.Flags, args).as_plain_dict()
    assert saved["env_kwargs"] == '{"size": 6}'
    assert (saved["frame_stack"], saved["wrappers"]) == (2, f"{TASKS}:Doubled")
    assert saved["imports"] == TASKS


# ---------------------------------------------------------------------------------- frame stacks


def test_a_stack_of_frames_begins_anew_with_each_episode():
    envs = make_envs(EnvOptions(f"{TASKS}:Corridor", frame_stack=3), num_envs=1)
    places = [envs.reset()["frame"][0].argmax(axis=1).tolist()]
    places += [envs.step(ZERO)["frame"][0].argmax(axis=1).tolist() for _ in range(5)]
    assert places == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [0, 0, 0], [0, 0, 1]]


def test_atari_stacks_as_many_frames_as_are_asked_for():
    assert shape_of(env="PongNoFrameskip-v4", frame_stack=2) == (2, 84, 84)
    assert shape_of(env="PongNoFrameskip-v4", wrappers=f"{TASKS}:Doubled") == (4, 84, 84)


def two_cart_poles(num_envs):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


def test_a_vector_environment_stacks_its_frames_itself():
    with pytest.raises(UsageError, match="stack frames in the factory"):
        make_envs(EnvOptions(f"{__name__}:two_cart_poles", frame_stack=2), num_envs=2)


# ------------------------------------------------------------------------------------ names

NEW = """
import sys
from torchbeast.envs import EnvOptions, look_at
print(look_at(EnvOptions(*sys.argv[1:2], imports=sys.argv[2])).observation.shape)
"""


@pytest.mark.parametrize(
    ("env", "imports"), [(f"{TASKS}:HelpersCorridor-v0", ""), ("HelpersCorridor-v0", TASKS)]
)
def test_ids_that_a_module_of_ones_own_registers_are_found(env, imports):
    """In a process that has not imported it yet."""
    command = [sys.executable, "-c", NEW, env, imports]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "(4,)\n", result.stderr


@pytest.fixture
def late(tmp_path, monkeypatch):
    """An installed package whose function registers Late/Corridor-v0, once it is called."""
    (tmp_path / "late.py").write_text(
        "import gymnasium\n"
        "calls = []\n"
        "def register():\n"
        "    calls.append(1)\n"
        f"    gymnasium.register('Late/Corridor-v0', '{TASKS}:Corridor')\n"
        "def fail():\n"
        "    raise OSError('no licence')\n"
    )
    info = tmp_path / "late-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gymnasium.envs]\nLate = late:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "late"
    gymnasium.registry.pop("Late/Corridor-v0", None)
    sys.modules.pop("late", None)


def test_a_function_that_registers_ids_is_called_once(late):
    with pytest.raises(UsageError, match=r"its package has registered it; add --import late:regis"):
        look_at(EnvOptions("Late/Corridor-v0"))
    options = EnvOptions("Late/Corridor-v0", imports="late:register")
    for _ in range(2):
        assert look_at(options).observation.shape == (4,)
    assert sys.modules["late"].calls == [1]
    with pytest.raises(UsageError, match="did you mean Late/Corridor-v0"):
        check_env(EnvOptions("Late/Corridors-v0", imports="late:register"))
    for function, sentence in {
        "fail": r"--import late:fail: it fails with OSError: no licence \(.*late.py:7",
        "nothing": r"--import takes package.module:name, and late:nothing cannot be imported",
    }.items():
        with pytest.raises(UsageError, match=sentence):
            check_env(EnvOptions("Catch", imports=f"late:{function}"))


def test_the_hint_for_an_unknown_id_names_the_flag_that_helps():
    with pytest.raises(
        UsageError, match=r"Gymnasium id \(with --import MODULE if a module registers"
    ):
        check_env(EnvOptions("MyGrid-v0"))
    with pytest.raises(UsageError, match=f"--import {TASKS} has registered none of this name"):
        check_env(EnvOptions("MyGrid-v0", imports=TASKS))


def test_an_id_of_old_gym_is_told_from_one_that_nobody_knows(monkeypatch):
    for registry in ({"Old-v0": 1}, SimpleNamespace(env_specs={"Old-v0": 1})):  # 0.26, 0.21
        gym = SimpleNamespace(envs=SimpleNamespace(registry=registry))
        monkeypatch.setitem(sys.modules, "gym", gym)
        with pytest.raises(UsageError, match="this one is old Gym's; name its class as package"):
            check_env(EnvOptions("Old-v0"))
        with pytest.raises(UsageError, match="'Old-v0' is registered with old Gym, and not with"):
            check_env(EnvOptions(f"{TASKS}:Old-v0"))
        with pytest.raises(UsageError, match="with --import MODULE"):
            check_env(EnvOptions("Older-v0"))


class FailsAtOnce(gymnasium.Env):
    def __init__(self):
        raise AssertionError


def test_an_environment_that_cannot_be_made_ends_in_one_sentence(capsys):
    with pytest.raises(UsageError, match=r"cannot be made or reset: AssertionError: "):
        look_at(EnvOptions(f"{__name__}:FailsAtOnce"))
    assert "Traceback" in capsys.readouterr().err


class NoStepWorks(gymnasium.Env):
    """As old environments behind a wrapper of newer Gym."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        _observation, _reward, _terminated, _truncated, _info = range(4)


def test_an_environment_that_cannot_be_stepped_ends_in_one_sentence(capsys):
    with pytest.raises(UsageError, match=r"cannot be stepped: ValueError: .*test_env_options"):
        look_at(EnvOptions(f"{__name__}:NoStepWorks"))
    assert "Traceback" in capsys.readouterr().err


def test_an_error_within_a_package_is_not_said_to_be_ours():
    wrong = EnvOptions("FrozenLake-v1", env_kwargs='{"desc": 3}')
    with pytest.raises(UsageError, match="cannot be made or reset") as caught:
        look_at(wrong)
    assert "registry.py" not in str(caught.value)


class OpensAWindow(gymnasium.Env):
    """As in packages that were made to be looked at."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode="human"):
        if render_mode == "human":
            raise OSError("Cannot connect to a display")
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_a_function_that_opens_a_window_by_default_is_asked_not_to():
    options = EnvOptions(f"{__name__}:OpensAWindow")
    assert look_at(options).observation.shape == (1,)
    assert make_envs(options, num_envs=1, render=True).envs[0].render_mode == "rgb_array"


def test_the_hint_for_a_wrong_name_in_a_module_is_a_name_that_works():
    with pytest.raises(UsageError, match="did you mean HelpersCorridor-v0") as caught:
        check_env(EnvOptions(f"{TASKS}:HelperCorridor-v0"))
    assert "registers no Gymnasium id of that name" in str(caught.value)
    check_env(EnvOptions(f"{TASKS}:HelpersCorridor-v0"))


# ------------------------------------------------------------------------------------ video


def film(env, path):
    import cv2

    envs = make_envs(EnvOptions(env), num_envs=1, seed=0, render=True)
    envs.reset()
    video = Video(path, envs)
    try:
        for _ in range(5):
            envs.step(ZERO)
            video.add()
    finally:
        video.close()
        envs.close()
    return cv2.VideoCapture(str(path)).get(cv2.CAP_PROP_FPS)


def test_a_factory_that_takes_a_render_mode_is_filmed_at_its_own_speed(tmp_path):
    assert film(f"{TASKS}:Corridor", tmp_path / "own.mp4") == 7
    assert film(f"{TASKS}:HelpersCorridor-v0", tmp_path / "id.mp4") == 7
    assert film("PongNoFrameskip-v4", tmp_path / "game.mp4") == 15  # of 60, each 4th


class OldGym:
    """Is told what to render to when it renders."""

    metadata = {"video.frames_per_second": 11}  # noqa: RUF012
    picture = np.zeros((8, 8, 3), np.uint8)

    def reset(self):
        return np.zeros(1, np.float32)

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, {}

    def render(self, mode="human"):
        return self.picture if mode == "rgb_array" else None


class OldGymWithoutPictures(OldGym):
    picture = None


class OldGymInAWrapper(OldGym):
    def render(self, *args, **kwargs):
        return super().render(*args, **kwargs)


@pytest.mark.parametrize("env", ["OldGym", "OldGymInAWrapper"])
def test_old_environments_are_filmed(env, tmp_path):
    assert film(f"{__name__}:{env}", tmp_path / "old.mp4") == 11


@pytest.mark.parametrize("env", [f"{TASKS}:corridor", f"{__name__}:OldGymWithoutPictures"])
def test_what_cannot_be_filmed_is_said_in_one_sentence(env, tmp_path):
    with pytest.raises(UsageError, match=r"^[A-Za-z]+ must render to rgb_array"):
        film(env, tmp_path / "none.mp4")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "A lost life ends the episode"),
        ({"episodic_life": False}, "a game is one"),
        ({"wrappers": "gymnasium.wrappers:NormalizeReward"}, "one by one"),
        ({"env_kwargs": '{"difficulty": 1}'}, "one by one"),
        ({"env": "CartPole-v1"}, ""),
    ],
)
def test_what_a_lost_life_is_to_the_learner_is_said(options, text):
    options = EnvOptions(**{"env": "BreakoutNoFrameskip-v4", **options})
    assert text in describe_lives(options)
    assert text or describe_lives(options) == ""
    make_envs(options, 1, 1).close()  # all of them can be played


def test_an_observation_that_is_text_is_refused_with_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "missions.py").write_text(
        "import gymnasium, numpy\n"
        "class Mission(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Dict(mission=gymnasium.spaces.Text(9))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return {'mission': 'go there'}, {}\n"
        "gymnasium.register('Mission-v0', Mission)\n"
        "class Plain(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (2,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def __init__(self):\n"
        "        pass\n"
        "    def reset(self, seed=None, options=None):\n"
        "        return numpy.zeros(2, numpy.float32), {}\n"
        "    def step(self, action):\n"
        "        return numpy.zeros(2, numpy.float32), 0.0, False, False, {}\n"
        "gymnasium.register('Plain-v0', Plain)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"--env missions:Mission-v0: A Text space has no arrays"):
        look_at(EnvOptions("missions:Mission-v0"))
    # And one whose class takes no render_mode is made.
    assert look_at(EnvOptions("missions:Plain-v0")).observation.shape == (2,)
