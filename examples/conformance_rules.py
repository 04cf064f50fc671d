"""The rules of env.proto for what a client sends, as conformance.py checks them.

Sizes, dtypes and too large numbers are checked with the gateway's own code. What a gateway cannot
afford to check, that counts and sums are right, is checked here.
"""

from typing import Any

import numpy as np

import nest
from libtorchbeast.action_masks import ActionMasks, WrongMask, count_choices
from libtorchbeast.rows import NUMBERS, Row
from libtorchbeast.rpc.handshake import EnvironmentFailed, Hello, Refused
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import decode_hello
from libtorchbeast.rpc.step_messages import StepReader, encode_actions
from libtorchbeast.specs import ArraySpec, describe, split_mask


class BrokenRule(Exception):
    """A rule that the client broke: what was expected, and what came."""


def expect(what: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise BrokenRule(f"{what} must be {expected}, got {got}")


def check_hello(data: bytes, token: str, expected_token: str) -> Hello:
    """Check the first message, and the token that came before it; raises `BrokenRule`."""
    if token != expected_token:
        raise BrokenRule(
            "the call's metadata must have `authorization: Bearer ` and the token of "
            "TORCHBEAST_TOKEN, got another or none"
        )
    try:
        hello = decode_hello(data, Limits().max_message_bytes)
    except (Refused, EnvironmentFailed) as error:
        raise BrokenRule(str(error)) from error
    _, mask = split_mask(hello.spec.observation)
    if mask is not None:
        sizes = sum(int(np.prod(leaf.shape)) for leaf in nest.flatten(mask))
        expect("the number of elements of action_mask", count_choices(hello.spec.action), sizes)
    return hello


class StepRules:
    """Checks the Steps of one stream, from first to last."""

    def __init__(self, hello: Hello, is_new: bool = True, knows_truncation: bool = True) -> None:
        """`is_new`: the client was just started, so that no episode is under way."""

        def zeros(spec: ArraySpec) -> np.ndarray:
            return np.zeros((hello.num_envs, *spec.shape), spec.dtype)

        self._rows = nest.map(zeros, hello.spec.row)
        self._reader = StepReader(hello.spec, hello.num_envs, self._rows)
        self._is_new = is_new
        self._knows_truncation = knows_truncation
        self._last: Row | None = None
        _, mask = split_mask(self._rows["frame"])
        self._masks = ActionMasks(hello.spec.action, "a Step") if mask is not None else None
        self._is_stuck = np.zeros(hello.num_envs, np.bool_)  # where the mask allows nothing
        self.mask: np.ndarray | None = None
        """[K, num_choices]: what is possible now; None without masks. A mask that allows nothing
        allows everything here."""
        self.num_steps = 0
        self.num_episodes = 0
        self.num_truncated = 0

    def check(self, data: bytes) -> None:
        """Check the next Step; raises `BrokenRule`."""
        try:
            self._reader.read(data)  # sizes, finite numbers: the gateway's own checks
        except Refused as refusal:
            raise BrokenRule(f"Step {self.num_steps}: {refusal}") from refusal
        except EnvironmentFailed as failure:
            raise BrokenRule(f"the client sent a Failure: {failure}") from failure
        row = {name: self._rows[name].copy() for name in NUMBERS}
        for env in range(len(row["done"])):
            try:
                self._check_environment(row, env)
            except BrokenRule as broken:
                where = f"Step {self.num_steps}, environment {env}"
                raise BrokenRule(f"{where}: {broken}") from None
        if self._masks is not None:
            self._check_mask(self._masks, row)
        if self._last is not None:
            self.num_episodes += int(row["done"].sum())
            self.num_truncated += int(row["truncated"].sum())
        self._last = row
        self.num_steps += 1

    def _check_mask(self, masks: ActionMasks, row: Row) -> None:
        """A mask may allow nothing only on the last row before a time limit's extra row."""
        bad = self._is_stuck & ~row["truncated"]
        if bad.any():
            raise BrokenRule(
                f"Step {self.num_steps - 1}, environment {int(bad.argmax())}: action_mask must "
                "allow an action at each choice, got one that allows none"
            )
        leaves = nest.flatten(split_mask(self._rows["frame"])[1])
        flat = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
        try:
            self.mask = masks.check(flat, is_last=True)
        except WrongMask as error:
            raise BrokenRule(f"Step {self.num_steps}: {error}") from None
        self._is_stuck = ~masks.allow(flat.astype(np.bool_))

    def _check_environment(self, row: Row, env: int) -> None:
        now = {name: numbers[env].item() for name, numbers in row.items()}
        reward, truncated = now["reward"], now["truncated"]
        step, total = now["episode_step"], now["episode_return"]
        if self._last is None:
            expect("reward of the first Step", 0.0, reward)
            expect("episode_step of the first Step", 0, step)
            expect("episode_return of the first Step", 0.0, total)
            expect("truncated of the first Step", False, truncated)
            return
        before = {name: numbers[env].item() for name, numbers in self._last.items()}
        last_step, last_total = before["episode_step"], before["episode_return"]
        # If an episode goes on from the stream before, its counts are not known here.
        may_go_on = self.num_steps == 1 and not self._is_new
        if truncated:
            if not self._knows_truncation:
                raise BrokenRule("truncated must be false for a learner without knows_truncation")
            expect("reward of a truncated environment", 0.0, reward)
            if may_go_on:  # the stream before broke on the very Step that hit the limit
                return
            if before["done"]:
                raise BrokenRule("truncated must follow an ordinary Step, got it after done")
            if step == 0 and total == 0:  # it broke, and another took its place
                return
            expect("episode_step of a truncated environment", last_step, step)
            expect("episode_return of a truncated environment", last_total, total)
            return
        goes_on = not before["done"]
        if may_go_on and step > 1:
            return
        expect("episode_step", last_step + 1 if goes_on else 1, step)
        expected = last_total + reward if goes_on else reward
        if abs(total - expected) > 1e-3 * max(1.0, abs(expected)):
            expect("episode_return", expected, total)


def choose_actions(
    hello: Hello, random: np.random.Generator, mask: np.ndarray | None = None
) -> bytes:
    """Random Actions that fit, and that a mask [K, num_choices] allows; floats may exceed bounds.

    If actions are numbered, each of them comes sooner or later.
    """
    start = 0

    def choose(spec: ArraySpec) -> np.ndarray:
        nonlocal start
        shape, dtype = (hello.num_envs, *spec.shape), np.dtype(spec.dtype)
        if dtype.kind == "f":
            low, high = (np.clip(bound, -1, 1) for bound in spec.bounds)
            return random.uniform(low - 0.1, high + 0.1, shape).astype(dtype)
        if mask is None or not spec.num_choices:
            counts = np.reshape(spec.num_categories or 2, spec.shape if spec.num_categories else ())
            return random.integers(0, counts, shape).astype(dtype)
        allowed = mask[:, start : start + spec.num_choices]
        start += spec.num_choices
        if spec.is_bits:
            bits = random.integers(0, 2, allowed.shape) & allowed
            return bits.reshape(shape).astype(dtype)
        draws = np.where(allowed, random.random(allowed.shape), -1.0)
        parts = np.split(draws, np.cumsum(spec.num_categories)[:-1], axis=1)
        chosen = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        return chosen.reshape(shape).astype(dtype)

    return encode_actions(nest.map(choose, hello.spec.action))


def describe_hello(hello: Hello) -> str:
    number = hello.spec.num_actions
    actions = f", {number} of them" if number else ""
    return (
        f"{hello.name!r}, {hello.num_envs} environments, observations "
        f"{describe(hello.spec.observation)}, actions {describe(hello.spec.action)}{actions}"
    )
