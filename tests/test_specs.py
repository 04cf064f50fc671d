"""Specs say what a Gymnasium space says, and travel as JSON."""

import collections
import json
import types

import numpy as np
import pytest
from gymnasium import spaces

from libtorchbeast.rows import Spec
from libtorchbeast.rpc.handshake import Hello, Refused, check_hello
from libtorchbeast.specs import (
    INT64,
    ArraySpec,
    UnknownSpace,
    agents_action,
    canonical,
    count_actions,
    discrete,
    environments_action,
    has_offsets,
    observation_spec_of,
    spec_of,
    spec_of_space,
    spec_or,
    with_bounds,
)

CART_POLE = np.array([4.8, np.inf, 0.42, np.inf], np.float32)
SPACES = [
    (spaces.Box(0, 255, (2, 3), np.uint8), ArraySpec("uint8", (2, 3), 0, 255)),
    (spaces.Box(-1.0, 1.0, (), np.float32), ArraySpec("float32", (), -1.0, 1.0)),
    (spaces.Box(-np.inf, np.inf, (3,), np.float32), ArraySpec("float32", (3,))),
    (
        spaces.Box(-CART_POLE, CART_POLE),
        ArraySpec("float32", (4,), tuple((-CART_POLE).tolist()), tuple(CART_POLE.tolist())),
    ),
    (spaces.Discrete(3), discrete(3)),
    (spaces.Discrete(3, start=5), ArraySpec("int64", (), 5, 7, True)),
    (spaces.MultiDiscrete([2, 3]), ArraySpec("int64", (2,), 0, (1, 2), True)),
    (
        spaces.MultiDiscrete([[2, 2]], start=[[1, 4]]),
        ArraySpec("int64", (1, 2), (1, 4), (2, 5), True),
    ),
    (spaces.MultiBinary((2, 2)), ArraySpec("int8", (2, 2), 0, 1, True)),
    (
        spaces.Dict({"move": spaces.Discrete(4), "aim": spaces.Box(-1, 1, (2,), np.float32)}),
        {"aim": ArraySpec("float32", (2,), -1.0, 1.0), "move": discrete(4)},
    ),
    (spaces.Tuple([spaces.Discrete(2)]), (discrete(2),)),
]


@pytest.mark.parametrize(("space", "spec"), SPACES, ids=[str(space) for space, _ in SPACES])
def test_spaces_become_specs_and_travel_as_json(space, spec):
    assert spec_of_space(space) == spec
    whole = Spec(spec, spec)
    assert Spec.from_json(json.loads(json.dumps(whole.to_json()))) == whole


MANY = np.arange(1, 90_001).reshape(300, 300)


def test_a_stand_in_for_discrete_without_gym_is_one():
    """As packages have it that do without Gym if it is not installed."""
    stand_in = collections.namedtuple("DiscreteSpace", "n")
    assert spec_or(None, stand_in(17)) == discrete(17)
    assert spec_or(None, types.SimpleNamespace(n=3, shape=(2,))) is None  # of something else
    assert spec_or(None, object()) is None


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Box(0 * MANY[0], MANY[0], dtype=np.int64), ArraySpec("int64", (300,), 0, 300)),
        (spaces.Discrete(2**33), ArraySpec("int64", (), 0, 2**33 - 1)),
        (spaces.Discrete(100_000), ArraySpec("int64", (), 0, 99_999, True)),
        (spaces.MultiBinary((300, 300)), ArraySpec("int8", (300, 300), 0, 1)),
        (spaces.MultiDiscrete(MANY), ArraySpec("int64", (300, 300), 0, 89_999)),
        (spaces.MultiDiscrete([3] * 300), ArraySpec("int64", (300,), 0, 2, True)),
    ],
    ids=str,
)
def test_of_large_observations_the_widest_bounds_and_no_categories_are_kept(space, spec):
    got = observation_spec_of(space)
    assert got == spec
    check_hello(Hello("x", 1, Spec(got, INT64)), 0, 1 << 20)


def test_actions_have_their_own_bounds_however_many_they_are():
    high = np.arange(1.0, 201.0, dtype=np.float32)
    taken = spec_of_space(spaces.Box(-high, high))
    check_hello(Hello("x", 1, Spec(INT64, taken)), 0, 1 << 20)
    actions = environments_action(taken, np.full((1, 200), 1e6, np.float32))
    assert actions[0].tolist() == high.tolist()


def test_actions_that_are_too_large_are_refused_with_a_sentence():
    taken = spec_of_space(spaces.MultiDiscrete(MANY))
    with pytest.raises(Refused, match=r"spec of the action may have 65536 bytes, got .* use fewer"):
        check_hello(Hello("x", 1, Spec(INT64, taken)), 0, 1 << 20)


class Mission(spaces.Space):
    """Sentences of one's own."""


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), Mission()])
def test_spaces_without_arrays_are_refused_with_a_sentence(space):
    with pytest.raises(UnknownSpace, match=f"A {type(space).__name__} space has no arrays"):
        spec_of_space(space)
    assert observation_spec_of(space) is None


@pytest.mark.parametrize("value", [None, (4,), "image", 7])
def test_what_is_no_space_says_nothing(value):
    assert spec_or(INT64, value) == INT64
    assert spec_or(INT64, spaces.Discrete(2)) == discrete(2)


def test_the_number_of_actions_is_that_of_one_discrete_number():
    assert count_actions(discrete(6)) == 6
    assert count_actions(INT64) == 0  # nobody said
    for space in (spaces.MultiDiscrete([2, 3]), spaces.Box(0, 5, (), np.int64), spaces.Dict()):
        assert count_actions(spec_of_space(space)) == 0


def test_a_space_gives_bounds_to_arrays_of_its_shape_whatever_their_dtype():
    arrays = {"a": np.zeros((7, 2), np.float32), "b": np.zeros(7, np.int64)}
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": spaces.Discrete(4)})
    assert with_bounds(spec_of(arrays), spec_of_space(space)) == {
        "a": ArraySpec("float32", (2,), -1.0, 1.0),
        "b": discrete(4),
    }


@pytest.mark.parametrize(
    "space", [spaces.Box(-1, 1, (3,)), spaces.Dict({}), spaces.Tuple([spaces.Discrete(2)])]
)
def test_a_space_that_does_not_fit_the_arrays_says_nothing(space):
    assert with_bounds(spec_of({"a": np.zeros((7, 2))}), spec_of_space(space)) == {
        "a": ArraySpec("float64", (2,))
    }


def test_actions_are_counted_from_0_and_shifted_where_they_are_taken():
    space = spaces.Dict(
        {
            "move": spaces.Discrete(3, start=-1),
            "grid": spaces.MultiDiscrete([2, 3], start=[10, 20]),
            "aim": spaces.Box(-1, 1, (1,), np.float32),
        }
    )
    taken = spec_of_space(space)
    shown = agents_action(taken)
    assert has_offsets(taken)
    assert not has_offsets(shown)
    assert shown["move"] == discrete(3)
    assert shown["grid"] == ArraySpec("int64", (2,), 0, (1, 2), True)
    aim = np.array([[0.5], [0.25]], np.float32)
    actions = {"move": np.array([0, 2]), "grid": np.array([[0, 0], [1, 2]]), "aim": aim}
    shifted = environments_action(taken, actions)
    assert shifted["move"].tolist() == [-1, 1]
    assert shifted["grid"].tolist() == [[10, 20], [11, 22]]
    assert shifted["aim"].tolist() == aim.tolist()
    assert all(space["grid"].contains(one) for one in shifted["grid"])


def test_specs_correspond_whatever_their_bounds():
    assert canonical({"b": [discrete(3)], "a": ArraySpec("uint8", (2,), 0, 1)}) == canonical(
        {"a": ArraySpec("uint8", (2,), 0, 255), "b": (INT64,)}
    )
