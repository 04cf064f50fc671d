"""Gymnasium's vector environments behind the `Environments` protocol."""

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.tree import map_tree
from torchbeast.envs.spaces import count_actions, observer
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
        space: Any = env.single_action_space
        self.num_envs = env.num_envs
        self.num_actions = count_actions(space)
        self._first_action = int(space.start)
        self._env = env
        self._seed = seed
        self._observe = observer(env.single_observation_space)
        self._counter = EpisodeCounter(env.num_envs)
        self._ended = np.zeros(env.num_envs, np.bool_)  # in the last step
        self._hit_time_limit = np.zeros(env.num_envs, np.bool_)

    def reset(self) -> Row:
        # Gymnasium counts on from one seed to its neighbours, hence one that has none in use.
        seed = None if self._seed is None else derive_seed(self._seed, 0)
        frame, _ = self._env.reset(seed=seed)
        return self._counter.first_row(self._as_frame(frame))

    def step(self, actions: np.ndarray) -> Row:
        moves = np.asarray(actions) + self._first_action
        frame, reward, terminated, truncated, _ = self._env.step(moves)
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
        """A copy: the environment may use its memory again."""
        return map_tree(np.array, self._observe(frame))
