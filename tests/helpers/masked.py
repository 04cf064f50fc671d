"""Environments with masks of actions, which insist on actions that are possible."""

import gymnasium
import numpy as np
from gymnasium import spaces

PLACES = ("observation", "info", "method")


class Masked(gymnasium.Env):
    """A new mask at each step, offered at `place`; masked actions raise.

    `end` is how an episode of 4 steps ends; its last observation allows nothing.
    """

    def __init__(self, action_space=None, place="info", end="terminated"):
        self.action_space = spaces.Discrete(5, start=2) if action_space is None else action_space
        self.observation_space = spaces.Box(-1.0, 1.0, (3,))
        self._place, self._end = place, end
        if place == "observation":
            mask = spaces.MultiBinary(len(self._draw(self.action_space)))
            parts = {"board": self.observation_space, "action_mask": mask}
            self.observation_space = spaces.Dict(parts)
        if place == "method":
            self.action_masks = lambda: self.mask

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return self._show()

    def step(self, action):
        if not self.action_space.contains(action):
            raise AssertionError(f"{action} is not in {self.action_space}")
        self._check(self.action_space, action, self.mask)
        self._time += 1
        is_last = self._time == 4
        frame, info = self._show(is_last)
        ends = (is_last and self._end == "terminated", is_last and self._end == "truncated")
        return frame, 1.0, *ends, info

    def _show(self, is_last=False):
        self.mask = self._draw(self.action_space)
        if is_last:
            self.mask[:] = 0
        frame = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        if self._place == "observation":
            return {"board": frame, "action_mask": self.mask}, {}
        return frame, {"action_mask": self.mask} if self._place == "info" else {}

    def _draw(self, space):
        """Flat, with something possible at each choice."""
        if isinstance(space, spaces.Dict):
            return np.concatenate([self._draw(part) for _, part in sorted(space.items())])
        if isinstance(space, spaces.MultiBinary):
            return self.np_random.integers(0, 2, space.n, np.int8)
        masks = []
        for n in sizes_of(space):
            mask = self.np_random.integers(0, 2, n, np.int8)
            mask[self.np_random.integers(n)] = 1
            masks.append(mask)
        return np.concatenate(masks) if masks else np.zeros(0, np.int8)

    def _check(self, space, action, mask):
        if isinstance(space, spaces.Dict):
            for key, part in sorted(space.items()):
                size = len(self._draw(part))
                self._check(part, action[key], mask[:size])
                mask = mask[size:]
        elif isinstance(space, spaces.MultiBinary):
            assert not (action & ~mask.astype(bool)).any(), "a bit that may not be 1"
        else:
            choices = [] if isinstance(space, spaces.Box) else np.ravel(action - space.start)
            for n, choice in zip(sizes_of(space), choices, strict=True):
                assert mask[choice], f"{action} is masked"
                mask = mask[n:]


def sizes_of(space):
    """Of each choice; a Box has none."""
    if isinstance(space, spaces.Box):
        return []
    return [space.n] if isinstance(space, spaces.Discrete) else list(space.nvec.ravel())


class Broken(Masked):
    """Raises at its second step."""

    def step(self, action):
        if self._time == 1:
            raise RuntimeError("broken")
        return super().step(action)
