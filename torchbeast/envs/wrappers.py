"""Wrappers of single environments that know masks of actions: stacks of observations, and masks
in the observation, wherever the environment offers them."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from libtorchbeast.action_masks import ActionMasks, count_choices, find_masks, with_mask
from libtorchbeast.specs import ACTION_MASK


def wrap(env: Any, wrappers: Sequence[Callable[[Any], Any]]) -> Any:
    """With the wrappers around it, the first one innermost."""
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def stack_frames(env: gymnasium.Env, number: int) -> gymnasium.Env:
    """Show `number` observations at once, with the newest mask alone.

    The first observation of an episode stands for those before it.
    """
    space = env.observation_space
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        env = _MaskInInfo(env)
    return FrameStackObservation(env, number)


class _MaskInInfo(gymnasium.Wrapper):
    """Moves the mask from the observation to `info`, where nobody stacks it."""

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
    """`env` with masks in its observations, as rows have them.

    `action` is the spec of the agent's action. What has its mask there already, or is no
    environment of Gymnasium's, is left as it is.
    """
    space = getattr(env, "observation_space", None)
    has_mask = isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces
    return env if has_mask or not isinstance(env, gymnasium.Env) else MaskedObservation(env, action)


class MaskedObservation(gymnasium.Wrapper):
    """Takes masks from `info` or `action_masks()`, whichever the first reset shows."""

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
        if self._masks is None:  # another environment than the agent was trained with
            return observation
        return self._masks.add(self.env, observation, info, is_last)
