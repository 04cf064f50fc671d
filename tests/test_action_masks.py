"""Masks of actions, wherever environments offer them: only what is possible happens."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from libtorchbeast.action_masks import ActionMasks, WrongMask
from libtorchbeast.groups import spec_of_group
from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete
from libtorchbeast.sync_envs import SyncEnvs
from tests.helpers.masked import PLACES, Broken, Masked
from tests.test_any_space import learn_from
from torchbeast.envs import EnvOptions, look_at, make_envs
from torchbeast.envs.spaces import observe
from torchbeast.envs.vector import VectorEnvs
from torchbeast.errors import UsageError
from torchbeast.models.factory import make_model

SPACES = {
    "discrete": spaces.Discrete(5, start=2),
    "multi": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "bits": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        {"b": spaces.MultiBinary(2), "aim": spaces.Box(-1, 1, (2,)), "c": spaces.Discrete(3)}
    ),
}


def masked_envs(make=Masked, num_envs=2, rebuild=False, **kwargs):
    return SyncEnvs(
        lambda: make(**kwargs), num_envs, seed=0, observe=observe, rebuild=rebuild, masks=True
    )


def choose(masks, random):
    """An action that is possible for each of [K, n]."""
    return np.array([random.choice(np.flatnonzero(mask)) for mask in masks])


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("space", SPACES)
def test_the_impossible_never_happens_and_the_learner_masks_as_the_actor_did(space, place):
    # The environment raises if a masked action is taken; `learn_from` compares log-probabilities.
    rows, loss = learn_from(masked_envs(action_space=SPACES[space], place=place))
    assert loss.isfinite()
    for row in rows:
        assert row["frame"]["action_mask"].dtype == np.bool_


def test_masks_stay_right_over_time_limits_and_in_rebuilt_environments(caplog):
    rows, loss = learn_from(masked_envs(end="truncated"), use_lstm=True)
    assert loss.isfinite()
    assert any(row["truncated"].any() for row in rows)
    rows, loss = learn_from(masked_envs(make=Broken, rebuild=True))
    assert loss.isfinite()
    assert "is rebuilt with a new seed" in caplog.text


def test_the_last_observation_of_an_episode_may_allow_nothing():
    envs = masked_envs(num_envs=1, end="truncated")
    row, random = envs.reset(), np.random.default_rng(0)
    for _ in range(4):
        row = envs.step(choose(row["frame"]["action_mask"], random))
    assert not row["done"].any()
    assert row["frame"]["action_mask"].all()  # whatever is done here is not taken
    assert envs.step(np.array([0]))["truncated"].all()


def test_all_places_give_the_same_row():
    specs = {}
    for place in PLACES:
        envs = masked_envs(place=place)
        specs[place] = spec_of_group(envs, envs.reset())
    board = ArraySpec("float32", (3,), -1.0, 1.0)
    mask = ArraySpec("bool", (5,))
    assert specs["observation"] == Spec({"board": board, "action_mask": mask}, discrete(5))
    assert specs["info"] == specs["method"]
    assert specs["info"] == Spec({"observation": board, "action_mask": mask}, discrete(5))


class Odd(Masked):
    """Shows some mask, at reset and from then on."""

    def __init__(self, masks, action_space=None):
        super().__init__(action_space)
        self._masks = masks

    def _show(self, is_last=False):
        frame, _ = super()._show()
        mask = self._masks[min(self._time, len(self._masks) - 1)]
        return frame, {} if mask is None else {"action_mask": mask}

    def _check(self, *args):
        pass


@pytest.mark.parametrize(
    ("masks", "space", "sentence"),
    [
        ([np.ones(4)], None, r"from info must have 5 numbers for actions int64\[\], got 4\."),
        ([np.full(5, 0.5)], None, r"must hold 1 for what is possible and 0 for .*, got \[0\.5"),
        ([np.zeros(5)], None, "must allow an action at each choice, got one that allows none"),
        ([np.array([1, 1, 0, 0, 0])], SPACES["multi"], "must have 11 numbers .*, got 5"),
        ([[1, 1], [1, 1]], spaces.Box(-1, 1, (2,)), r"is for Discrete, .* for float32\[2\]; leave"),
        ([np.ones(5), None], None, "must be there at each reset and step, as it was at the first"),
        ([None, np.ones(5)], None, "must have one at reset, too, got the first after a step"),
    ],
)
def test_a_mask_that_makes_no_sense_gets_one_sentence(masks, space, sentence):
    envs = masked_envs(make=Odd, num_envs=1, masks=masks, action_space=space)

    def play():
        envs.step(envs.reset()["last_action"])

    with pytest.raises(ValueError, match=sentence) as error:
        play()
    assert "\n" not in str(error.value)


def test_one_number_is_no_mask_for_several_actions():
    masks = ActionMasks((discrete(2), discrete(2)), "info")
    with pytest.raises(WrongMask, match=r"from info must have 4 numbers .*, got 1"):
        masks.add(None, np.zeros(3), {"action_mask": 1})


def odd(size):
    """A factory."""
    return Odd([np.ones(size)])


def test_a_mask_of_another_size_ends_a_run_before_it_starts():
    options = EnvOptions("tests.test_action_masks:odd", env_kwargs='{"size": 3}')
    with pytest.raises(UsageError, match=r"^--env tests\S+: The action_mask from info must have 5"):
        look_at(options)


def test_nothing_allowed_is_a_failure_like_others():
    calm, stuck = np.ones(5), np.zeros(5)
    envs = masked_envs(make=Odd, num_envs=1, rebuild=True, masks=[calm, stuck])
    envs.reset()
    row = envs.step(np.array([0]))
    assert row["truncated"].all()
    assert row["frame"]["action_mask"].all()


def test_an_observation_of_nothing_but_a_mask_is_refused():
    class Nothing(Masked):
        def _show(self, is_last=False):
            return {"action_mask": np.ones(5)}, {}

    with pytest.raises(WrongMask, match="must have a part besides its action_mask"):
        masked_envs(make=Nothing).reset()


def test_masks_are_nested_like_the_action_or_flat():
    space = SPACES["dict"]
    for mask in ({"b": [0, 1], "c": [1, 0, 0]}, np.array([0, 1, 1, 0, 0]), {"c": [1, 0, 0]}):
        envs = masked_envs(make=Odd, num_envs=1, masks=[mask], action_space=space)
        bits = [True, True] if len(mask) == 1 else [False, True]
        assert envs.reset()["frame"]["action_mask"].tolist() == [[*bits, True, False, False]]
    pair = spaces.MultiDiscrete([2, 3])  # Gymnasium's own masks of these are tuples
    mask = (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    envs = masked_envs(make=Odd, num_envs=1, masks=[mask], action_space=pair)
    assert envs.reset()["frame"]["action_mask"].tolist() == [[True, False, False, True, True]]


def test_old_gyms_environments_are_asked_by_their_method():
    class Old:
        action_space, observation_space = spaces.Discrete(2), spaces.Box(0, 1, (1,))

        def reset(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            assert action == 1
            return np.zeros(1, np.float32), 0.0, False, {}

        def action_masks(self):
            return [False, True]

    envs = masked_envs(make=Old)
    assert envs.reset()["frame"]["action_mask"].tolist() == [[False, True]] * 2


def stackable(place):
    """A factory."""
    return Masked(place=place)


@pytest.mark.parametrize("place", PLACES)
def test_of_stacked_frames_only_the_newest_mask_counts(place):
    options = EnvOptions("tests.test_action_masks:stackable", frame_stack=3)
    options = EnvOptions(**{**vars(options), "env_kwargs": f'{{"place": "{place}"}}'})
    envs = make_envs(options, 2, seed=0)
    row, random = envs.reset(), np.random.default_rng(0)
    for _ in range(6):
        frame = row["frame"]
        assert frame["action_mask"].shape == (2, 5)
        assert frame["board" if place == "observation" else "observation"].shape == (2, 3, 3)
        row = envs.step(choose(frame["action_mask"], random))  # raises if it is an older mask
        assert not row["truncated"].any()


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_vectors_of_environments_have_masks_in_all_modes(mode, place, end):
    parts = [lambda: Masked(place=place, end=end)] * 3
    envs = VectorEnvs(SyncVectorEnv(parts, autoreset_mode=mode), seed=0)
    row, random = envs.reset(), np.random.default_rng(0)
    spec = spec_of_group(envs, row)
    assert spec.observation["action_mask"] == ArraySpec("bool", (5,))
    num_ends = 0
    for _ in range(14):
        masks = row["frame"]["action_mask"]
        assert masks.any(axis=1).all()
        row = envs.step(choose(masks, random))  # raises if it is impossible
        num_ends += row["done"].sum()
    assert num_ends >= 6
    envs.close()


def test_gymnasiums_taxi_has_a_mask():
    spec = look_at(EnvOptions("gymnasium.envs.toy_text.taxi:TaxiEnv"))
    assert spec.observation["action_mask"] == ArraySpec("bool", (6,))
    assert spec.observation["observation"].num_categories == (500,)


@pytest.mark.parametrize(
    ("action", "mask"),
    [(discrete(3), ArraySpec("int8", (4,))), (ArraySpec("float32", (2,)), ArraySpec("int8", (2,)))],
)
def test_a_mask_from_elsewhere_that_fits_no_action_is_refused_with_a_sentence(action, mask):
    spec = Spec({"board": ArraySpec("float32", (2,)), "action_mask": mask}, action)
    with pytest.raises(UsageError, match="must have one number for each choice"):
        make_model("auto", spec, use_lstm=False)


def test_wrappers_between_hide_no_method():
    env = gymnasium.wrappers.TimeLimit(Masked(place="method"), 9)
    assert "action_mask" in masked_envs(make=lambda: env, num_envs=1).reset()["frame"]
