"""How models of one's own are made, and what is said of one that cannot be."""

import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from libtorchbeast.rows import Spec
from libtorchbeast.specs import agents_action, spec_of_space
from torchbeast import user_code
from torchbeast.envs.spaces import space_of_spec
from torchbeast.errors import UsageError
from torchbeast.models import make_model

SPACES = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(np.array([0, -np.inf]), np.array([np.inf, 2]), dtype=np.float32),
    spaces.Box(0, 255, (4, 84, 84), np.uint8),
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
    spaces.MultiBinary(4),
    spaces.MultiBinary((2, 3)),
    spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([spaces.Box(0, 1, (), np.float32)])),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_survives_as_a_spec(space):
    assert space_of_spec(spec_of_space(space)) == space


def test_integers_without_bounds_have_those_of_their_dtype():
    space = space_of_spec(spec_of_space(spaces.Box(-(2**31), 2**31 - 1, (2,), np.int32)))
    assert space.contains(np.array([-(2**31), 2**31 - 1], np.int32))


SPEC = Spec(
    spec_of_space(spaces.Dict(x=SPACES[0], y=SPACES[2])),
    agents_action(spec_of_space(spaces.Discrete(3, start=-1))),
)


class Asks(nn.Module):
    """Keeps what it is made with."""

    def __init__(self, **given):
        super().__init__()
        self.given = given


class Fixed(nn.Module):
    """Knows what its environments are like."""

    def __init__(self, size=7):
        super().__init__()
        self.size = size


def make(function, spec=SPEC):
    with user_code.offer({"own:Model": function}):
        return make_model("own:Model", spec, use_lstm=True)


def test_a_model_that_asks_for_spaces_gets_them():
    def model(action_space, observation_space, use_lstm, size=3):
        return Asks(a=action_space, o=observation_space, lstm=use_lstm, size=size)

    given = make(model).given
    assert given["o"] == spaces.Dict(x=SPACES[0], y=SPACES[2])
    assert given["a"] == spaces.Discrete(3)  # whatever the environment's first one is
    assert given["lstm"] is True
    assert given["size"] == 3


def test_a_model_may_ask_for_one_of_them():
    assert make(lambda observation_space, num_actions: Asks(n=num_actions)).given == {"n": 3}


def test_a_model_may_ask_for_the_distribution_of_its_actions():
    (found,) = make(lambda distribution: Asks(found=distribution)).given.values()
    assert found.num_params == 3
    box = Spec(SPEC.observation, spec_of_space(spaces.Box(-1, 1, (2,), np.float32)))
    (found,) = make(lambda distribution: Asks(found=distribution), box).given.values()
    assert found.num_params == 4  # means and deviations


def test_a_model_as_in_torchbeast_gets_shapes():
    given = make(lambda shape, n, lstm: Asks(shape=shape, n=n, lstm=lstm)).given
    assert given == {"shape": {"x": (3,), "y": (4, 84, 84)}, "n": 3, "lstm": True}


def test_a_model_may_leave_what_it_does_not_ask_for():
    assert make(lambda num_actions, use_lstm=False: Asks(n=num_actions, lstm=use_lstm)).given == {
        "n": 3,
        "lstm": True,
    }
    assert make(lambda num_actions: Asks(n=num_actions)).given == {"n": 3}
    given = make(lambda shape, n, **more: Asks(n=n, **more)).given
    assert given == {"n": 3, "use_lstm": True}
    assert make(Fixed).size == 7


def fails(frame_shape, num_actions, use_lstm):
    return nn.Linear(frame_shape["z"], 1)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda size, width: nn.Linear(1, 1),
            r"takes \(size, width\), and can be called with \(frame_shape, num_actions",
        ),
        (lambda: nn.Linear(1, 1), r"takes \(\), and can be called with \(frame_shape, num_actions"),
        (lambda action_space, size: None, r"takes \(action_space, size\).*missing.*'size'"),
        (lambda *shapes: 3, r"must make a torch.nn.Module, got int"),
        (fails, r"cannot be made: KeyError: 'z' \(.*test_own_models.py:\d+: return nn.Linear"),
    ],
)
def test_a_model_that_cannot_be_made_is_one_sentence(function, sentence):
    with pytest.raises(UsageError, match=sentence):
        make(function)
