"""One environment, old Gym's or Gymnasium's, as a group of one."""

from typing import Any

import numpy as np

import nest
from libtorchbeast.environments import Row
from libtorchbeast.specs import ArraySpec


def without_truncation(row: Row) -> Row:
    """For a learner that does not know `truncated`: the extra row is a last step without reward."""
    extra = row["truncated"]
    return {**row, "truncated": np.zeros_like(extra), "episode_step": row["episode_step"] + extra}


class Episode:
    """Counts the steps and rewards of one environment's episode, and makes its rows."""

    def __init__(self) -> None:
        self._step = 0
        self._return = 0.0

    def first_row(self, frame: Any) -> Row:
        """The row before any step."""
        self._step, self._return = 0, 0.0
        return self._row(frame, 0.0, done=True, truncated=False)

    def row(self, frame: Any, reward: float, done: bool) -> Row:
        """The row after a step; after `done` the next episode begins."""
        self._step += 1
        self._return += reward
        row = self._row(frame, reward, done, truncated=False)
        if done:
            self._step, self._return = 0, 0.0
        return row

    def row_after_time_limit(self, frame: Any) -> Row:
        """The extra row: the first of the next episode, and no step led to it."""
        row = self._row(frame, 0.0, done=True, truncated=True)
        self._step, self._return = 0, 0.0
        return row

    def _row(self, frame: Any, reward: float, done: bool, truncated: bool) -> Row:
        return {
            "frame": nest.map(lambda leaf: np.asarray(leaf)[None], frame),
            "reward": np.array([reward], np.float32),
            "done": np.array([done], np.bool_),
            "truncated": np.array([truncated], np.bool_),
            "episode_step": np.array([self._step], np.int32),
            "episode_return": np.array([self._return], np.float32),
        }


class SingleEnv:
    """One environment behind the protocol of groups."""

    num_envs = 1

    def __init__(self, env: Any, knows_truncation: bool = True) -> None:
        """Without `knows_truncation`, a time limit is an end like any other."""
        self._env = env
        self._knows_truncation = knows_truncation
        self._episode = Episode()
        self._hit_time_limit = False
        space = getattr(env, "action_space", None)
        self.action_spec: Any = ArraySpec("int64") if space is None else spec_of_space(space)
        self.num_actions = int(getattr(space, "n", 0)) if _is_discrete(space) else 0

    def reset(self) -> Row:
        return self._episode.first_row(self._reset())

    def step(self, actions: Any) -> Row:
        if self._hit_time_limit:
            self._hit_time_limit = False
            return self._episode.row_after_time_limit(self._reset())
        result = self._env.step(nest.map(lambda leaf: leaf[0], actions))
        frame, reward, terminated, truncated = self._read(result)
        if truncated and not terminated and self._knows_truncation:
            self._hit_time_limit = True
            return self._episode.row(frame, reward, done=False)
        done = terminated or truncated
        return self._episode.row(self._reset() if done else frame, reward, done)

    def close(self) -> None:
        if callable(getattr(self._env, "close", None)):
            self._env.close()

    def _reset(self) -> Any:
        result = self._env.reset()
        # A pair with a dict is Gymnasium's (observation, info).
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        return result[0] if is_pair else result

    def _read(self, result: Any) -> tuple[Any, float, bool, bool]:
        """What `step` returned: observation, reward, terminated, truncated."""
        if len(result) == 5:
            frame, reward, terminated, truncated, _ = result
            return frame, float(reward), bool(terminated), bool(truncated)
        frame, reward, done, info = result
        truncated = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated"))
        return frame, float(reward), bool(done) and not truncated, truncated


def spec_of_space(space: Any) -> Any:
    """A Gym or Gymnasium space as a nest of specs; by its attributes, for any version of them."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, (list, tuple)):
        return tuple(spec_of_space(part) for part in parts)
    if parts is not None:
        return {key: spec_of_space(part) for key, part in parts.items()}
    if _is_discrete(space):
        return ArraySpec("int64")
    return ArraySpec(str(np.dtype(space.dtype)), tuple(int(n) for n in space.shape))


def _is_discrete(space: Any) -> bool:
    return type(space).__name__ == "Discrete"
