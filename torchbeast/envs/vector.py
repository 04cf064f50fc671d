"""Gymnasium's vector environments behind the `Environments` protocol."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from torchbeast.envs.row import EpisodeCounter, Row
from torchbeast.errors import UsageError


class VectorEnvs:
    """Steps a `VectorEnv` that resets an environment at the step after its episode's end.

    That step is the extra row which a time limit needs. After a true end it is one more step of the
    episode, without reward: the value of the last observation is learnt to be 0.
    """

    def __init__(self, env: VectorEnv, seed: int | None = None) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode is None:
            raise UsageError(
                f"{type(env).__name__} must say when it resets; set "
                'metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP if it resets at the step '
                "after an end."
            )
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.NEXT_STEP.value):
            raise UsageError(
                f"A vector environment must reset at the step after an end, got {mode}; make it "
                "with autoreset_mode=AutoresetMode.NEXT_STEP."
            )
        space = env.single_action_space
        if not isinstance(space, gymnasium.spaces.Discrete) or space.start != 0:
            raise UsageError(
                f"The environment's action_space must be Discrete, got {space}; "
                "wrap the environment so that its actions are numbers from 0 to n - 1."
            )
        self.num_envs = env.num_envs
        self.num_actions = int(space.n)
        self._env = env
        self._seed = seed
        self._observation_space = env.single_observation_space
        self._counter = EpisodeCounter(env.num_envs)
        self._ended = np.zeros(env.num_envs, np.bool_)  # in the last step
        self._hit_time_limit = np.zeros(env.num_envs, np.bool_)

    def reset(self) -> Row:
        frame, _ = self._env.reset(seed=self._seed)
        return self._counter.first_row(self._as_frame(frame))

    def step(self, actions: np.ndarray) -> Row:
        frame, reward, terminated, truncated, _ = self._env.step(actions)
        done, extra = self._ended, self._hit_time_limit
        reward = np.where(done, 0.0, reward)
        row = self._counter.row(self._as_frame(frame), reward, done, extra, actions)
        row["episode_step"] -= done & ~extra  # the episode had no such step
        self._ended = (terminated | truncated) & ~done
        self._hit_time_limit = truncated & ~terminated & ~done
        return row

    def close(self) -> None:
        self._env.close()

    def _as_frame(self, frame: Any) -> Any:
        """Observations that are one of n numbers become vectors with a 1 at that number."""
        space = self._observation_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return np.eye(int(space.n), dtype=np.float32)[frame - space.start]
        return _copy(frame)


def _copy(frame: Any) -> Any:
    """A copy (the environment may use its memory again), with floats as the learner wants them."""
    if isinstance(frame, dict):
        return {name: _copy(part) for name, part in frame.items()}
    if isinstance(frame, tuple):
        return tuple(_copy(part) for part in frame)
    frame = np.array(frame)
    return frame.astype(np.float32) if frame.dtype == np.float64 else frame
