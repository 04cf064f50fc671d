"""What a model is tried with before training could have come from its environments."""

import numpy as np
import pytest
from gymnasium import spaces

from libtorchbeast.action_masks import with_mask
from libtorchbeast.rows import ArraySpec, Spec
from libtorchbeast.specs import spec_of_space
from libtorchbeast.tree import map_tree
from torchbeast.run.model_trial import draw, random_rows

T, B = 20, 10
SPACES = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([2, -np.inf, -np.inf]), np.array([np.inf, -3, np.inf]), dtype=np.float32),
    spaces.Box(0, 255, (2, 2), np.uint8),
    spaces.Box(100, 200, (2,), np.int16),
    spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32),
    spaces.Discrete(3, start=5),
    spaces.MultiDiscrete([2, 30], start=[1, -7]),
    spaces.MultiBinary(4),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(0, 1, (), np.float64)])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_rows_are_within_the_space(space):
    rows = random_rows(Spec(spec_of_space(space)), T, B)
    for t in range(T):
        for b in range(B):
            observation = map_tree(lambda x, i=(t, b): x[i], rows["frame"])
            if isinstance(space, spaces.Discrete):
                observation = int(observation)
            assert space.contains(observation), observation


def test_all_numbers_of_small_spaces_are_drawn():
    rows = random_rows(Spec(spec_of_space(spaces.Discrete(3, start=5))), T, B)
    assert set(rows["frame"].ravel()) == {5, 6, 7}


def test_bounds_that_say_nothing_are_no_bounds():
    """Nets of one's own need not stand 1e38, which is what CartPole declares."""
    frame = draw(ArraySpec("float32", (4,), -3e38, 3e38), (T,), np.random.default_rng(0))
    assert (np.abs(frame) <= 1).all()
    assert len(np.unique(frame)) > 1


def test_integers_of_unknown_range_are_zero_and_bytes_are_bytes():
    generator = np.random.default_rng(0)
    assert not draw(ArraySpec("int64", (4,)), (T,), generator).any()
    assert draw(ArraySpec("uint8", (4,)), (T,), generator).max() > 128


@pytest.mark.parametrize("mask", [ArraySpec("bool", (3,)), ArraySpec("int8", (3,), 0, 1, True)])
def test_every_action_is_possible(mask):
    rows = random_rows(Spec(with_mask(ArraySpec("float32", (2,)), mask)), T, B)
    assert rows["frame"]["action_mask"].all()
