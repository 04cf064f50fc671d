"""Wrappers of single environments with action masks: one stacks observations, one adds the mask to
the observation, wherever the environment has it."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from libtorchbeast.action_masks import ActionMasks, count_choices, find_masks, with_mask
from libtorchbeast.specs import ACTION_MASK


def wrap(env: Any, wrappers: Sequence[Callable[[Any], Any]]) -> Any:
    """Put the wrappers around an environment, the first one innermost."""
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def stack_frames(env: gymnasium.Env, number: int) -> gymnasium.Env:
    """Stack the last `number` observations; of the action masks, only the newest is kept.

    At the start of an episode, its first observation is repeated.
    """
    space = env.observation_space
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        env = _MaskInInfo(env)
    return FrameStackObservation(env, number)


class _MaskInInfo(gymnasium.Wrapper):
    """Moves the mask from the observation to `info`, where it is not stacked."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        parts = env.observation_space.spaces.items()
        self.observation_space = spaces.Dict({k: v for k, v in parts if k != ACTION_MASK})

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return self._move(*self.env.reset(**options))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        frame, reward, terminated, truncated, info = self.env.step(action)
        frame, info = self._move(frame, info)
        return frame, reward, terminated, truncated, info

    def _move(self, frame: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        rest = {key: part for key, part in frame.items() if key != ACTION_MASK}
        return rest, {**info, ACTION_MASK: frame[ACTION_MASK]}


def show_masks(env: Any, action: Any) -> Any:
    """`env` with action masks in its observations, as in rows.

    `action` is the spec of the agent's action. Environments that have the mask there already, or
    are not Gymnasium's, are returned unchanged.
    """
    space = getattr(env, "observation_space", None)
    has_mask = isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces
    return env if has_mask or not isinstance(env, gymnasium.Env) else MaskedObservation(env, action)


class MaskedObservation(gymnasium.Wrapper):
    """Adds masks to observations, from `info` or `action_masks()`, as found at the first reset."""

    def __init__(self, env: gymnasium.Env, action: Any) -> None:
        super().__init__(env)
        self._action = action
        self._masks: ActionMasks | None = None
        space = env.observation_space
        seen = space.spaces if isinstance(space, spaces.Dict) else space
        mask = spaces.MultiBinary(count_choices(action))
        self.observation_space = spaces.Dict(with_mask(seen, mask))

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        if self._masks is None:
            self._masks = find_masks(self.env, observation, info, self._action)
        return self._add(observation, info), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        is_last = bool(terminated or truncated)
        return self._add(observation, info, is_last), reward, terminated, truncated, info

    def _add(self, observation: Any, info: Any, is_last: bool = False) -> Any:
        if self._masks is None:  # not an environment like the agent's
            return observation
        return self._masks.add(self.env, observation, info, is_last)
