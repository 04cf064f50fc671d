"""Catch as pictures on an even grey background, like a game's: what kills badly scaled filters."""

import numpy as np
from gymnasium import spaces

from torchbeast.envs.toys import Catch

BACKGROUND, BRIGHT = 87, 236


class ImageCatch(Catch):
    """Each square of the board is 8x16 pixels of a 4x84x84 frame."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def _board(self):
        squares = np.kron(super()._board(), np.ones((8, 16)))
        frame = np.full((4, 84, 84), BACKGROUND, np.uint8)
        frame[:, 2:82, 2:82] = np.where(squares > 0, BRIGHT, BACKGROUND)
        return frame
