"""A board game with an action mask: tic-tac-toe against an opponent who plays at random.

python -m torchbeast.polybeast --env examples.tic_tac_toe:TicTacToe --total_steps 500000
python -m torchbeast.polybeast --mode test --env examples.tic_tac_toe:TicTacToe

The mask is in `info`; a key `action_mask` in a Dict observation or a method `action_masks()` would
do as well.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ROWS = np.arange(9).reshape(3, 3)
LINES = np.array([*ROWS, *ROWS.T, ROWS.diagonal(), ROWS[::-1].diagonal()])
ME, OTHER = 1.0, -1.0


class TicTacToe(gymnasium.Env):
    """The board has 1 where the agent is, -1 where the opponent is; who begins is random.

    A win pays 1, a defeat -1. Only free fields are possible actions.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (9,), np.float32)
        self.action_space = spaces.Discrete(9)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._board = np.zeros(9, np.float32)
        if self.np_random.integers(2):
            self._let_other_play()
        return self._board.copy(), self._info()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._board[action] != 0:
            raise ValueError(f"Field {action} is taken.")
        self._board[action] = ME
        if not self._is_over():
            self._let_other_play()
        reward = float(self._has_won(ME)) - float(self._has_won(OTHER))
        return self._board.copy(), reward, self._is_over(), False, self._info()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": self._board == 0}

    def _let_other_play(self) -> None:
        self._board[self.np_random.choice(np.flatnonzero(self._board == 0))] = OTHER

    def _is_over(self) -> bool:
        return self._has_won(ME) or self._has_won(OTHER) or bool((self._board != 0).all())

    def _has_won(self, player: float) -> bool:
        return bool((self._board[LINES] == player).all(axis=1).any())
