"""Small tasks of our own: `Catch`, `Memory` and `Mock` (constant frames, for measuring speed)."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Catch(gymnasium.Env):
    """A ball falls down a 10x5 board; move the paddle on the lowest row under it.

    Actions: left, stay, right. Reward at the end only: 1 if caught, else -1.
    """

    ROWS, COLUMNS = 10, 5

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (self.ROWS, self.COLUMNS), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._ball_row, self._ball_column = 0, int(self.np_random.integers(self.COLUMNS))
        self._paddle = self.COLUMNS // 2
        return self._board(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._paddle = min(max(self._paddle + action - 1, 0), self.COLUMNS - 1)
        self._ball_row += 1
        landed = self._ball_row == self.ROWS - 1
        reward = 0.0
        if landed:
            reward = 1.0 if self._paddle == self._ball_column else -1.0
        return self._board(), reward, landed, False, {}

    def _board(self) -> np.ndarray:
        board = np.zeros((self.ROWS, self.COLUMNS), np.float32)
        board[self._ball_row, self._ball_column] = 1.0
        board[self.ROWS - 1, self._paddle] = 1.0
        return board


class Memory(gymnasium.Env):
    """A cue is shown once, at the start; after a delay of blank frames it must be repeated.

    At the question every episode looks the same, so that a policy without memory is right half of
    the time: mean return 0. Only the answer counts: 1 if right, else -1.
    """

    DELAY = 4

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._cue = int(self.np_random.integers(2))
        self._time = 0
        return self._frame(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        asked = self._time == self.DELAY
        reward = (1.0 if action == self._cue else -1.0) if asked else 0.0
        self._time += 1
        return self._frame(), reward, asked, False, {}

    def _frame(self) -> np.ndarray:
        cue = float(2 * self._cue - 1) if self._time == 0 else 0.0
        question = float(self._time == self.DELAY)
        return np.array([cue, question], np.float32)


class Mock(gymnasium.Env):
    """Always the same Atari-shaped frame: takes hardly any time, for measuring all the rest."""

    NUM_ACTIONS = 6
    EPISODE_STEPS = 1000

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.action_space = spaces.Discrete(self.NUM_ACTIONS)
        self._frame = np.full((4, 84, 84), 128, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        return self._frame, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._time += 1
        return self._frame, 0.0, self._time == self.EPISODE_STEPS, False, {}


TOYS = {"Catch": Catch, "Memory": Memory, "Mock": Mock}
