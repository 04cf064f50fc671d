"""The row: what environments return at each step. Its fields, dtypes and rule for the whole system.

A row is a dict of arrays [K, ...] of K environments that step together: `frame` (the observation,
an array or a tree of arrays), the numbers in `NUMBERS`, and `last_action`. In hosts, which copy
rows on at once, the numbers may be lists (`EpisodeLists`), and so may actions that are one integer.

`done` on a row: its frame is the first of a new episode; reward, episode_step and episode_return on
that row belong to the episode that just ended. `truncated` on a row: the transition into it did not
happen. A time limit therefore gives an ordinary row with the true final frame, then one extra row
with the reset frame, `done` and `truncated` set, whose action the environment ignored.
A row with `done` and episode_step 0 ends no episode: the very first row, a lost life, or the
first row of an environment that was rebuilt.

Pure Python; needs only NumPy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from libtorchbeast.specs import INT64, ArraySpec, count_actions, from_json, to_json
from libtorchbeast.tree import leaves_of, map_tree

Row = dict[str, Any]

NUMBERS = {
    "reward": "float32",
    "done": "bool",
    "truncated": "bool",
    "episode_step": "int32",
    "episode_return": "float32",
}
"""A row's fields besides `frame` and `last_action`, with dtypes: a number for each environment."""

_DTYPES = [(name, np.dtype(dtype)) for name, dtype in NUMBERS.items()]

MAX_NUMBER = 1e9
"""The limit of rewards and of floats in frames: larger ones make a model's outputs infinite."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
"""A larger number becomes infinite in a row, whose floats are float32."""
MAX_INT32 = 2**31 - 1

TORCHBEAST_FIELDS = ("frame", "reward", "done", "episode_step", "episode_return")
"""The fields of the tuple that code written for TorchBeast gets in place of a row."""


class Environments(Protocol):
    """A group: `num_envs` environments that step together.

    Optional attributes: `action_spec`, a nest of `ArraySpec` (default: one int64); `taken_action`
    (see `Spec.taken`); `observation_spec`, with the bounds of frames; `is_checked`, true if the
    group checks its rows itself; `take_info()`. Frames are nests of arrays or of `Unstacked`.
    """

    num_envs: int

    def reset(self) -> Row:
        """Start an episode in each environment; called once, before the first step."""

    def step(self, actions: Any) -> Row:
        """Take one of `actions` [num_envs, ...] in each; where an episode ends, start the next."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Spec:
    """Observation and action of one environment: trees of `ArraySpec`."""

    observation: Any
    action: Any = INT64
    taken: Any = field(default=None, compare=False)
    """The action as the environment itself takes it, with its own first category and dtype; None if
    unknown. It is not in the JSON: only the process that steps the environment needs it."""

    @property
    def num_actions(self) -> int:
        """n if an action is a number from 0 to n - 1; 0 if it is something else, or unknown."""
        return count_actions(self.action)

    @property
    def row(self) -> Row:
        """The specs of all fields of a row."""
        numbers = {name: ArraySpec(dtype) for name, dtype in NUMBERS.items()}
        return {"frame": self.observation, **numbers, "last_action": self.action}

    @property
    def row_bytes(self) -> int:
        return sum(leaf.num_bytes for _, leaf in leaves_of(self.row))

    def to_json(self) -> Any:
        """As dicts, lists, strings and numbers."""
        return {"observation": to_json(self.observation), "action": to_json(self.action)}

    @classmethod
    def from_json(cls, json: Any) -> "Spec":
        return cls(from_json(json["observation"]), from_json(json["action"]))


# -------------------------------------------------------------------------------------------- rows


class EpisodeCounter:
    """Counts steps and sums rewards of each environment's episode, and makes the rows."""

    def __init__(self, num_envs: int, action: Any = INT64) -> None:
        """`action` is the spec of one environment's action."""
        self._steps = np.zeros(num_envs, np.int32)
        self._returns = np.zeros(num_envs, np.float64)
        self._action = action

    def first_row(self, frame: Any) -> Row:
        """The row before the first step: `done`, but no episode has ended."""
        num_envs = len(self._steps)
        self._steps[:] = 0
        self._returns[:] = 0.0
        row: Row = {name: np.zeros(num_envs, dtype) for name, dtype in NUMBERS.items()}
        row["done"][:] = True
        row["frame"] = frame
        row["last_action"] = map_tree(
            lambda spec: np.zeros((num_envs, *spec.shape), spec.dtype), self._action
        )
        return row

    def row(
        self,
        frame: Any,
        reward: np.ndarray,
        done: np.ndarray,
        truncated: np.ndarray,
        last_action: Any,
        ended: np.ndarray | None = None,
    ) -> Row:
        """The row after a step. `done` without `ended` (default: `done`) is only a lost life."""
        self._steps += ~truncated & (self._steps < MAX_INT32)  # the extra row is not a step
        self._returns += reward
        episode_step = self._steps.copy()
        if ended is None:
            ended = done
        else:
            episode_step[done & ~ended] = 0
        numbers = (reward, done, truncated, episode_step, self._returns)
        last_action = map_tree(_as_action, self._action, last_action)
        row = _as_row(frame, _as_arrays(numbers), last_action)
        self._steps[ended] = 0
        self._returns[ended] = 0.0
        return row

    def forget(self, environment: int) -> None:
        """Reset one environment's counts: its episode broke off and is in no statistic."""
        self._steps[environment] = 0
        self._returns[environment] = 0.0


class EpisodeLists:
    """`EpisodeCounter` for lists, for environments that are stepped one after the other.

    There are few of them, and for a few numbers Python is faster than NumPy, above all where many
    processes share a core, so that the code of each function is loaded from memory again.
    """

    def __init__(self, num_envs: int, action: Any = INT64) -> None:
        """`action` is the spec of one environment's action."""
        self.keeps_lists = False
        """Whether numbers in rows stay lists, for a caller that copies rows on at once."""
        self._steps = [0] * num_envs
        self._returns = [0.0] * num_envs
        self._action = action
        # Looked up once: NumPy takes longer to parse a dtype's name than to convert nothing.
        self._action_dtype = np.dtype(action.dtype) if isinstance(action, ArraySpec) else None

    def first_row(self, frame: Any) -> Row:
        """The row before the first step: `done`, but no episode has ended."""
        for i in range(len(self._steps)):
            self.forget(i)
        return EpisodeCounter(len(self._steps), self._action).first_row(frame)

    def row(
        self,
        frame: Any,
        reward: list[float],
        done: list[bool],
        truncated: list[bool],
        last_action: Any,
    ) -> Row:
        """The row after a step."""
        steps, returns = self._steps, self._returns
        for i, value in enumerate(reward):
            returns[i] += value
            if not truncated[i] and steps[i] < MAX_INT32:  # the extra row is not a step
                steps[i] += 1
        if self._action_dtype is None:
            last_action = map_tree(_as_action, self._action, last_action)
        elif not (self.keeps_lists and type(last_action) is list):
            last_action = np.asarray(last_action, self._action_dtype)
        numbers: tuple[Any, ...] = (reward, done, truncated, steps[:], returns[:])
        if not self.keeps_lists:
            numbers = _as_arrays(numbers)
        row = _as_row(frame, numbers, last_action)
        for i, is_over in enumerate(done):
            if is_over:
                self.forget(i)
        return row

    def forget(self, environment: int) -> None:
        """Reset one environment's counts: its episode has ended, or broke off."""
        self._steps[environment] = 0
        self._returns[environment] = 0.0


def _as_arrays(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the values of `NUMBERS`, in that order."""
    return tuple(np.array(x, dtype) for x, (_, dtype) in zip(numbers, _DTYPES, strict=True))


def _as_row(frame: Any, numbers: tuple[Any, ...], last_action: Any) -> Row:
    """`numbers` are the values of `NUMBERS`, in that order."""
    row = dict(zip(NUMBERS, numbers, strict=True))
    row["frame"] = frame
    row["last_action"] = last_action
    return row


def _as_action(spec: ArraySpec, action: Any) -> np.ndarray:
    return np.asarray(action, spec.dtype)


def with_arrays(row: Row) -> Row:
    """The row with arrays in place of lists of numbers."""
    arrays = {name: np.asarray(row[name], dtype) for name, dtype in _DTYPES}
    last_action = row["last_action"]
    if type(last_action) is list and type(last_action[0]) is int:  # not a tree of arrays
        arrays["last_action"] = np.array(last_action, np.int64)
    return {**row, **arrays}


def as_first_row(row: Row, truncated: bool = False) -> Row:
    """The row as a first row: `done`, and reward, episode counts and last action are zero.

    `truncated` must be true if other rows came before it in the same rollout.
    """
    row = with_arrays(row)
    zeros = {k: np.zeros_like(row[k]) for k in ("reward", "episode_step", "episode_return")}
    flags = {"done": np.ones_like(row["done"]), "truncated": np.full_like(row["done"], truncated)}
    return {**row, **zeros, **flags, "last_action": map_tree(np.zeros_like, row["last_action"])}


def without_truncation(row: Row) -> Row:
    """A row for a learner without `truncated`: the extra row is one more step, without reward."""
    row = with_arrays(row)
    extra = row["truncated"]
    last_step = extra & (row["episode_step"] > 0)  # 0: the environment was rebuilt
    step = row["episode_step"] + last_step
    return {**row, "truncated": np.zeros_like(extra), "episode_step": step}


class Unstacked:
    """K arrays in place of one array [K, ...]: saves a copy if they are then copied anyway.

    Used for frames in hosts, which copy them to a lane or a message at once.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.dtype = arrays[0].dtype
        self.shape = (len(arrays), *arrays[0].shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.arrays).astype(dtype or self.dtype, copy=False)
