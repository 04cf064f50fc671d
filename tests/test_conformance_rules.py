"""The rules of examples/conformance.py: each is broken once, and named."""

import numpy as np
import pytest

from libtorchbeast.rows import Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.messages import encode_hello
from libtorchbeast.rpc.step_messages import encode_actions, encode_step
from libtorchbeast.specs import ArraySpec, discrete
from tests.helpers.examples import load

rules = load("conformance_rules")

HELLO = Hello("test", 1, Spec(ArraySpec("float32", (2,)), discrete(3)))
FIRST = (0.0, True, 0, 0.0, False)  # reward, done, episode_step, episode_return, truncated
STEPS = [
    FIRST,
    (1.0, False, 1, 1.0, False),
    (2.0, True, 2, 3.0, False),  # an end
    (0.5, False, 1, 0.5, False),
    (0.0, True, 1, 0.5, True),  # a time limit
    (4.0, True, 1, 4.0, False),  # an episode of one step
]


def encode(reward, done, count, total, truncated, size=2, frame=None):
    return encode_step(
        {
            "frame": np.zeros((1, size), np.float32) if frame is None else frame,
            "reward": np.array([reward], np.float32),
            "done": np.array([done]),
            "episode_step": np.array([count], np.int32),
            "episode_return": np.array([total], np.float32),
            "truncated": np.array([truncated]),
        }
    )


def check(steps, **options):
    checker = rules.StepRules(HELLO, **options)
    for step in steps:
        checker.check(encode(*step))
    return checker


def test_a_good_stream_breaks_no_rule():
    checker = check(STEPS)
    assert (checker.num_episodes, checker.num_truncated) == (3, 1)


def test_episodes_may_go_on_in_a_new_stream():
    steps = [FIRST, (1.0, False, 17, 20.0, False), (1.0, False, 18, 21.0, False)]
    check(steps, is_new=False)
    with pytest.raises(rules.BrokenRule, match="episode_step must be 1, got 17"):
        check(steps)
    with pytest.raises(rules.BrokenRule, match="episode_step must be 18, got 19"):
        check([*steps[:2], (1.0, False, 19, 21.0, False)], is_new=False)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([(0.0, False, 0, 0.0, False)], "Step 0: In the first Step .* every done must be true"),
        ([(1.0, True, 0, 0.0, False)], "environment 0: reward of the first Step must be 0.0"),
        ([(0.0, True, 5, 0.0, False)], "episode_step of the first Step must be 0, got 5"),
        ([(0.0, True, 0, 5.0, False)], "episode_return of the first Step must be 0.0, got 5"),
        ([(0.0, True, 0, 0.0, True)], "truncated of the first Step must be False"),
        ([FIRST, (np.nan, False, 1, 0.0, False)], r"Every reward must be from .*, got nan"),
        ([FIRST, (0.0, False, 1, np.inf, False)], r"Every episode_return must be from .*, got inf"),
        ([FIRST, (1.0, False, 1, 1.0, True)], "A truncated environment must be done, too"),
        ([FIRST, (0.0, True, 0, 0.0, True)], "truncated must follow an ordinary Step"),
        ([*STEPS[:3], (1.0, False, 3, 4.0, False)], "Step 3.* episode_step must be 1, got 3"),
        ([*STEPS[:2], (2.0, True, 0, 3.0, False)], "Step 2.* episode_step must be 2, got 0"),
        ([*STEPS[:2], (2.0, True, 2, 2.0, False)], "episode_return must be 3.0, got 2.0"),
        ([*STEPS[:4], (1.0, True, 1, 0.5, True)], "reward of a truncated .* must be 0.0, got 1"),
        ([*STEPS[:4], (0.0, True, 2, 0.5, True)], "episode_step of a truncated .* must be 1"),
        ([*STEPS[:4], (0.0, True, 1, 0.0, True)], "episode_return of a truncated .* must be 0.5"),
        ([(*FIRST, 3)], r"Observation 0 must have 8 bytes \(float32\[1, 2\]\), got 12"),
    ],
)
def test_a_broken_rule_is_named(steps, sentence):
    with pytest.raises(rules.BrokenRule, match=sentence):
        check(steps)


def test_a_learner_without_knows_truncation_must_not_see_any():
    with pytest.raises(rules.BrokenRule, match="truncated must be false"):
        check(STEPS, knows_truncation=False)


def test_a_hello_must_have_the_token_and_be_one():
    assert rules.check_hello(encode_hello(HELLO), "secret", "secret") == HELLO
    with pytest.raises(rules.BrokenRule, match="the token of TORCHBEAST_TOKEN, got another"):
        rules.check_hello(encode_hello(HELLO), "another", "secret")
    with pytest.raises(rules.BrokenRule, match="The first message must be a Hello, got step"):
        rules.check_hello(encode(*FIRST), "secret", "secret")


def test_masks_are_kept_and_must_leave_something():
    mask = {"action_mask": ArraySpec("int8", (2, 3)), "seen": ArraySpec("float32", (1,))}
    action = ArraySpec("int64", (2,), 0, 2, categories=True)
    hello = Hello("test", 1, Spec(mask, action))
    assert rules.check_hello(encode_hello(hello), "", "") == hello
    wrong = Hello("test", 1, Spec(mask, discrete(3)))
    with pytest.raises(rules.BrokenRule, match="elements of action_mask must be 3, got 6"):
        rules.check_hello(encode_hello(wrong), "", "")

    def play(*steps):
        checker = rules.StepRules(hello)
        for values, allowed in steps:
            frame = {"action_mask": np.array([allowed], np.int8), "seen": np.zeros((1, 1), "f4")}
            checker.check(encode(*values, frame=frame))
        return checker

    only, stuck = [[0, 1, 0], [0, 0, 1]], [[0, 1, 0], [0, 0, 0]]
    choose, random = rules.choose_actions, np.random.default_rng(0)
    checker = play((FIRST, only))
    assert {choose(hello, random, checker.mask) for _ in range(20)} == {
        encode_actions(np.array([[1, 2]]))
    }
    play((FIRST, only), (STEPS[1], stuck), ((0.0, True, 1, 1.0, True), only))  # a time limit
    with pytest.raises(rules.BrokenRule, match="Step 0, environment 0: action_mask must allow an"):
        play((FIRST, stuck), (STEPS[1], only))
    with pytest.raises(rules.BrokenRule, match="must hold 1 for what is possible"):
        play((FIRST, [[2, 1, 1], [1, 1, 1]]))


def test_floats_beyond_their_bounds_come_too():
    hello = Hello("test", 64, Spec(ArraySpec("float32", (2,)), ArraySpec("float32", (), 0.0, 1.0)))
    actions = pb.AgentMessage.FromString(rules.choose_actions(hello, np.random.default_rng(0)))
    numbers = np.frombuffer(actions.actions.action[0], np.float32)
    assert numbers.min() < 0 < 1 < numbers.max()


def test_actions_fit_and_all_of_them_come():
    random = np.random.default_rng(0)
    seen = {rules.choose_actions(HELLO, random) for _ in range(50)}
    assert len(seen) == HELLO.spec.num_actions
