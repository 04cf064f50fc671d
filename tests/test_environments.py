"""Groups of environments as processes make them: frames that nobody stacked."""

import itertools
import random

import gymnasium
import numpy as np
import pytest

import nest
from libtorchbeast.environments import Unstacked
from libtorchbeast.lanes import Lane
from libtorchbeast.rpc.steps import encode_step
from libtorchbeast.specs import ROW_FIELDS, ArraySpec, Spec, spec_of
from torchbeast.envs import EnvOptions, make_envs
from torchbeast.envs.sync import SyncEnvs
from torchbeast.groups import make_group

K = 3


def play(envs, num_steps):
    return [envs.reset(), *(envs.step(np.full(K, i % 2)) for i in range(num_steps))]


@pytest.mark.parametrize("env", ["Catch", "Mock", "CartPole-v1"])
def test_frames_left_apart_are_the_same_frames(env):
    together = play(make_envs(EnvOptions(env), K, seed=7), 30)
    apart = play(make_group(K, seed=7, env=env), 30)
    spec = Spec(spec_of(together[0]["frame"]), ArraySpec("int64"))
    assert spec_of(apart[0]["frame"]) == spec.observation
    assert encode_step(together[0]) == encode_step(apart[0])

    lane = Lane.create(spec, K)
    for expected, row in zip(together, apart, strict=True):
        assert isinstance(row["frame"], Unstacked)
        lane.write(row)
        for field, view in zip(ROW_FIELDS, lane.rows, strict=True):
            np.testing.assert_array_equal(view, expected[field])
    lane.release()


def test_each_array_of_a_tree_is_left_apart():
    class Tree:
        action_space = make_envs(EnvOptions("Catch"), 1).envs[0].action_space

        def reset(self):
            return {"a": np.arange(6.0).reshape(2, 3), "b": (np.zeros(2, np.uint8), 3)}

    envs = SyncEnvs(Tree, K)
    together = envs.reset()
    envs.join = Unstacked
    apart = envs.reset()
    assert all(isinstance(leaf, Unstacked) for leaf in nest.flatten(apart["frame"]))
    assert spec_of(apart["frame"]) == spec_of(together["frame"])
    assert spec_of(apart["frame"])["a"] == ArraySpec("float32", (2, 3))
    assert encode_step(apart) == encode_step(together)


def test_environments_may_disagree_about_the_dtype():
    class Sloppy:
        action_space = make_envs(EnvOptions("Catch"), 1).envs[0].action_space
        number = itertools.count()

        def reset(self):
            return np.array([1, 2] if next(self.number) == 0 else [0.5, 1.5])

    envs = SyncEnvs(Sloppy, K)
    envs.join = lambda arrays: Unstacked([array.copy() for array in arrays])
    frame = envs.reset()["frame"]
    assert spec_of(frame) == ArraySpec("float32", (2,))


@pytest.mark.parametrize("other", [np.zeros(2), np.zeros(3, np.float32)])
def test_arrays_that_differ_are_no_group(other):
    with pytest.raises(ValueError, match=r"must be alike, got float32\[3\]|float64\[2\]"):
        Unstacked([np.zeros(3), other])


def test_a_lane_takes_only_as_many_arrays_as_it_has_environments():
    lane = Lane.create(Spec(ArraySpec("float32", (4,)), ArraySpec("int64")), K)
    with pytest.raises(ValueError, match="shape"):
        lane.write(make_group(K - 1, seed=1, env="CartPole-v1").reset())
    lane.release()


class Dice:
    """An environment that knows only the global generators."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.first = random.random()

    def reset(self):
        return np.array([self.first, random.random(), np.random.rand()])


def test_the_seed_reaches_environments_that_draw_from_global_generators():
    def throw(seed):
        return np.asarray(make_group(K, seed=seed, env=f"{__name__}:Dice").reset()["frame"])

    np.testing.assert_array_equal(throw(3), throw(3))
    assert not (throw(3) == throw(4)).any()
