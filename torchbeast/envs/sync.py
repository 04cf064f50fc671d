"""Any Gymnasium environments, stepped one after the other in this process."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from torchbeast.envs.row import EpisodeCounter, Row
from torchbeast.errors import UsageError


class SyncEnvs:
    """`num_envs` single environments behind the `Environments` protocol."""

    join: Callable[[list[np.ndarray]], Any] = staticmethod(np.stack)
    """How the environments' arrays become one with num_envs as first dimension."""

    def __init__(self, make_env: Callable[[], Any], num_envs: int, seed: int | None = None) -> None:
        self.num_envs = num_envs
        self.envs = [as_gymnasium(make_env()) for _ in range(num_envs)]
        self.num_actions = _num_actions(self.envs[0])
        self._observation_space = getattr(self.envs[0], "observation_space", None)
        self._seed = seed
        self._counter = EpisodeCounter(num_envs)
        self._hit_time_limit = np.zeros(num_envs, np.bool_)

    def reset(self) -> Row:
        seeds = [None if self._seed is None else self._seed + i for i in range(self.num_envs)]
        frames = [env.reset(seed=seed)[0] for env, seed in zip(self.envs, seeds, strict=True)]
        return self._counter.first_row(self._as_frame(frames))

    def step(self, actions: np.ndarray) -> Row:
        frames = []
        reward = np.zeros(self.num_envs, np.float64)
        done = np.zeros(self.num_envs, np.bool_)
        truncated = self._hit_time_limit.copy()  # these rows are the extra ones
        for i, env in enumerate(self.envs):
            if self._hit_time_limit[i]:
                self._hit_time_limit[i] = False
                done[i] = True
                frame, _ = env.reset()
            else:
                frame, reward[i], done[i], self._hit_time_limit[i], _ = env.step(int(actions[i]))
                if done[i]:
                    self._hit_time_limit[i] = False
                    frame, _ = env.reset()
            frames.append(frame)
        return self._counter.row(self._as_frame(frames), reward, done, truncated, actions)

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def _as_frame(self, frames: list[Any]) -> Any:
        """Observations that are one of n numbers become vectors with a 1 at that number."""
        space = self._observation_space
        if _is_discrete(space):
            frames = [_as_vector(frame, space) for frame in frames]
        return self._join(frames)

    def _join(self, frames: list[Any]) -> Any:
        """A list of observations (trees of arrays or numbers) to one tree."""
        first = frames[0]
        if isinstance(first, dict):
            return {key: self._join([frame[key] for frame in frames]) for key in first}
        if isinstance(first, (tuple, list)):
            return tuple(self._join(list(parts)) for parts in zip(*frames, strict=True))
        arrays = [np.asarray(frame) for frame in frames]
        dtype = np.result_type(*arrays)
        dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        return self.join([array.astype(dtype, copy=False) for array in arrays])


class _OldGym:
    """Gives an old-style environment (reset -> frame, step -> 4 values) the Gymnasium interface."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None and callable(getattr(self._env, "seed", None)):
            self._env.seed(seed)
        result = self._env.reset()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._env.step(action)
        if len(result) == 5:
            return result
        frame, reward, done, info = result
        truncated = bool(done and info.get("TimeLimit.truncated", False))
        return frame, reward, bool(done and not truncated), truncated, info

    def close(self) -> None:
        if callable(getattr(self._env, "close", None)):
            self._env.close()


def as_gymnasium(env: Any) -> Any:
    """`env` if it is a Gymnasium environment, else a thin adapter around it."""
    return env if isinstance(env, gymnasium.Env) else _OldGym(env)


def _is_discrete(space: Any) -> bool:
    """By name, so that the old Gym's spaces fit, too."""
    return any(kind.__name__ == "Discrete" for kind in type(space).__mro__)


def _as_vector(number: Any, space: Any) -> np.ndarray:
    vector = np.zeros(int(space.n), np.float32)
    vector[int(number) - getattr(space, "start", 0)] = 1.0
    return vector


def _num_actions(env: Any) -> int:
    space: Any = getattr(env, "action_space", None)
    if not _is_discrete(space) or getattr(space, "start", 0) != 0:
        raise UsageError(
            f"The environment's action_space must be Discrete, got {space}; "
            "wrap the environment so that its actions are numbers from 0 to n - 1."
        )
    return int(space.n)
