"""`torchbeast.connect` with Gymnasium's spaces: what a learner gets, and what comes back."""

import numpy as np
import pytest
from gymnasium import spaces

import torchbeast
from libtorchbeast.rpc.messages import decode_hello, encode_hello
from libtorchbeast.rpc.simulator import Actor
from libtorchbeast.specs import ArraySpec, UnknownSpace, discrete

ADDRESS = "127.0.0.1:1"  # where nobody is


class Line:
    """In the place of a learner: keeps what it is shown, and answers as it is told."""

    knows_truncation = True

    def __init__(self, answers):
        self.rows, self.hello = [], None
        self._answers = answers

    def open(self, hello):
        self.hello = decode_hello(encode_hello(hello), 1 << 20)  # as it travels
        return self

    def show(self, row, info=None):
        self.rows.append(row)
        return self._answers(row)

    def close(self):
        pass


@pytest.fixture
def connect(monkeypatch):
    def start(answers, **options):
        line = Line(answers)
        monkeypatch.setattr(Actor, "_open_line", lambda self, hello: line.open(hello))
        return torchbeast.connect(ADDRESS, **options), line

    return start


def first_allowed(row):
    return row["frame"]["action_mask"].argmax(axis=1)


def test_a_box_as_action_travels_with_its_bounds_and_is_clipped_here(connect):
    action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 9.0]), dtype=np.float64)
    observation_space = spaces.Box(-2.0, 2.0, (2,))
    far = np.array([[5.0, 4.0]], np.float32)
    actor, line = connect(
        lambda row: far, observation_space=observation_space, action_space=action_space
    )
    action = actor.step([0.5, 1])  # a plain list, as the space's float32
    assert action.dtype == np.float64
    assert action.tolist() == [1.0, 4.0]
    assert line.hello.spec.observation == ArraySpec("float32", (2,), -2.0, 2.0)
    assert line.hello.spec.action == ArraySpec("float32", (2,), (-1.0, 0.0), (1.0, 9.0))
    actor.step([0.5, 1])
    assert line.rows[1]["last_action"].tolist() == far.tolist()  # what the agent drew


def test_masks_are_an_argument_or_a_part_of_the_observation(connect):
    space = spaces.Discrete(3, start=10)
    mask = np.array([0, 1, 1], np.int8)
    actor, line = connect(first_allowed, action_space=space)
    assert actor.step(np.zeros(2, np.float32), action_mask=mask) == 11
    frame = {"observation": ArraySpec("float32", (2,)), "action_mask": ArraySpec("bool", (3,))}
    assert line.hello.spec.observation == frame
    assert line.hello.spec.action == discrete(3)
    both = spaces.Dict({"board": spaces.MultiBinary(4), "action_mask": spaces.MultiBinary(3)})
    actor, line = connect(first_allowed, action_space=space, observation_space=both)
    assert actor.step({"board": [0, 1, 1, 0], "action_mask": mask}) == 11
    assert line.hello.spec.observation["board"] == ArraySpec("int8", (4,), 0, 1, categories=True)
    assert line.rows[0]["frame"]["action_mask"].tolist() == [[False, True, True]]


def test_a_final_observation_needs_no_mask(connect):
    actor, line = connect(first_allowed, num_actions=2)
    frame, mask = np.zeros(1, np.float32), [0, 1]
    actor.step(frame, action_mask=mask)
    actor.step(frame, 1.0, done=True, final_observation=frame + 1, action_mask=mask)
    assert [row["frame"]["action_mask"][0].tolist() for row in line.rows] == [
        [False, True],
        [True, True],
        [False, True],
    ]
    assert line.rows[2]["truncated"].all()


@pytest.mark.parametrize(
    ("options", "observation", "sentence"),
    [
        ({}, {"action_mask": [1, 1, 1]}, r"action_mask= must have 2 numbers .*, got 3"),
        ({}, {"action_mask": [0, 0]}, "must allow an action at each choice"),
        (
            {"observation_space": spaces.Box(0, 1, (3,))},
            {},
            r"must be float32\[3\] .*, got .*\[2\]",
        ),
        ({"observation_space": spaces.Discrete(3)}, {"observation": 0.5}, "must be int64"),
        ({"observation_space": spaces.Dict(a=spaces.Discrete(3))}, {}, "must be nested like its"),
    ],
)
def test_what_does_not_fit_the_spaces_gets_a_sentence(connect, options, observation, sentence):
    actor, _ = connect(lambda row: np.array([0]), num_actions=2, **options)
    with pytest.raises(ValueError, match=sentence):
        actor.step(**{"observation": np.zeros(2, np.float32), **observation})


def test_a_mask_that_comes_late_gets_a_sentence(connect):
    actor, _ = connect(lambda row: np.array([0]), num_actions=2)
    actor.step(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="must be given at each step, got none at the first"):
        actor.step(np.zeros(2, np.float32), action_mask=[1, 0])


def test_spaces_without_arrays_are_refused():
    with pytest.raises(UnknownSpace, match="A Text space has no arrays"):
        torchbeast.connect(ADDRESS, observation_space=spaces.Text(5), num_actions=2)
