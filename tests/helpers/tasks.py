"""Small tasks of users, each with something that ours have not. Importing this registers one."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast.envs.toys import Catch


class Task(gymnasium.Env):
    """Episodes of some steps; derived classes say what is seen, and what is paid."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 7}
    length = 1

    def __init__(self, space=None, render_mode=None):
        self.observation_space = space or spaces.Box(0, 1, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return self.observe(), {}

    def step(self, action):
        self._time += 1
        return self.observe(), self.pay(action), self._time >= self.length, False, {}

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def pay(self, action) -> float:
        return float(action)

    def render(self):
        return np.full((32, 32, 3), self._time % 256, np.uint8)


class Bandit(Task):
    """The arms pay 1 and 10."""

    def pay(self, action):
        return 10.0 if action == 1 else 1.0


class Guess(Task):
    """The observation says which action pays; in a dtype and shape that `space` gives."""

    length = 5

    def observe(self):
        self._answer = int(self.np_random.integers(2))
        low, high = self.observation_space.low, self.observation_space.high
        return np.asarray(high if self._answer else low, self.observation_space.dtype)[()]

    def step(self, action):
        right = action == self._answer
        frame, _, done, cut, info = super().step(action)
        return frame, 1.0 if right else -1.0, done, cut, info


def one_number():
    return Guess(spaces.Box(-1.0, 1.0, (), np.float32))


def wide_integers(dtype="uint16", high=60_000):
    return Guess(spaces.Box(0, high, (2,), np.dtype(dtype)))


class ByteCatch(Catch):
    """Its board has bytes that are 0 or 1."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 1, (self.ROWS, self.COLUMNS), np.uint8)

    def _board(self):
        return super()._board().astype(np.uint8)


class Corridor(Task):
    """The observation is the place, one-hot; `size` places, and a goal at the end."""

    def __init__(self, size=4, goal_reward=1.0, render_mode=None):
        super().__init__(spaces.Box(0, 1, (size,), np.float32), render_mode)
        self.length = size
        self.goal_reward = goal_reward

    def observe(self):
        frame = np.zeros(self.observation_space.shape, np.float32)
        frame[min(self._time, len(frame) - 1)] = 1
        return frame

    def pay(self, action):
        return self.goal_reward if self._time == self.length else 0.0


def corridor(size=4):
    """Takes no `render_mode`."""
    return Corridor(size)


class Doubled(gymnasium.RewardWrapper):
    """Pays twice."""

    def reward(self, reward):
        return 2 * float(reward)


class PlusOne(gymnasium.RewardWrapper):
    """Pays 1 more."""

    def reward(self, reward):
        return float(reward) + 1


gymnasium.register("HelpersCorridor-v0", entry_point=Corridor)


class Crowd(Task):
    """Two agents in one environment: a reward for each."""

    def step(self, action):
        print("a step")
        frame, reward, *rest = super().step(action)
        return frame, [reward, reward], *rest


class Endless(Task):
    """Has no end as long as the same is done."""

    def step(self, action):
        frame, reward, _, limit, info = super().step(action)
        return frame, reward, False, limit, info


class FourValues(Task):
    def step(self, action):
        frame, reward, over, _, info = super().step(action)
        return frame, reward, over, info
