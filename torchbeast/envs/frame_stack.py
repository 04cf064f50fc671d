"""Several observations at once, with the newest mask of actions alone."""

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation

from libtorchbeast.specs import ACTION_MASK


def stack_frames(env: gymnasium.Env, number: int) -> gymnasium.Env:
    """Show `number` observations at once; the first of an episode stands for those before it."""
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
