"""An environment of your own: find the treasure on a grid. Logs how often it is found.

python examples/own_environment.py
"""

from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces

import torchbeast

MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Treasure(gymnasium.Env):
    """The agent sees where it is and where the treasure is, and has 4 * size steps to get there."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012

    def __init__(self, size: int = 8, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.action_space = spaces.Discrete(len(MOVES))
        place = spaces.MultiDiscrete([size, size])  # one-hot for the built-in models
        self.observation_space = spaces.Dict(agent=place, treasure=place)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._time = 0
        self._agent, self._treasure = self.np_random.integers(self.size, size=(2, 2))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._time += 1
        self._agent = np.clip(self._agent + MOVES[action], 0, self.size - 1)
        found = bool((self._agent == self._treasure).all())
        too_late = self._time >= 4 * self.size
        # Numbers in the last `info` of an episode are logged: here as info/is_success.
        return self._observe(), float(found), found, too_late, {"is_success": found}

    def render(self) -> np.ndarray:
        image = np.zeros((self.size, self.size, 3), np.uint8)
        image[tuple(self._treasure)] = (255, 200, 0)
        image[tuple(self._agent)] = (0, 120, 255)
        return image.repeat(16, axis=0).repeat(16, axis=1)

    def _observe(self) -> dict[str, np.ndarray]:
        return {"agent": self._agent.copy(), "treasure": self._treasure.copy()}


def main(total_steps: int = 300_000, savedir: str = "~/logs/torchbeast") -> None:
    options: dict[str, Any] = {"savedir": savedir, "env_kwargs": {"size": 6}}
    run = torchbeast.train(Treasure, total_steps=total_steps, **options)
    print(f"Found in {run.figures['info/is_success']:.0%} of the last episodes")
    # A video of two episodes: <rundir>/test.mp4.
    torchbeast.evaluate(run.rundir.name, Treasure, render=True, num_episodes=2, **options)


if __name__ == "__main__":
    tyro.cli(main)
