"""A single environment whose observations have the mask of actions, wherever it offers one."""

from typing import Any

import gymnasium
from gymnasium import spaces

from libtorchbeast.action_masks import ActionMasks, count_choices, find_masks, with_mask
from libtorchbeast.specs import ACTION_MASK


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
