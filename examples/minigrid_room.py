"""MiniGrid: a dict observation with a part that is no array, and integers that are categories.

pip install minigrid
python examples/minigrid_room.py
"""

from typing import Any

import gymnasium
import numpy as np
import tyro
from gymnasium import spaces

import torchbeast

CATEGORIES = (11, 6, 4)  # of objects, colours, and states of doors


class Grid(gymnasium.ObservationWrapper):
    """Leaves out the mission, a text, and declares the integers in the image as categories."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        seen: Any = env.observation_space
        height, width, _ = seen["image"].shape
        image = spaces.MultiDiscrete(np.tile(CATEGORIES, (height, width, 1)))
        self.observation_space = spaces.Dict(image=image, direction=seen["direction"])

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        image = observation["image"].astype(np.int64)
        return {"image": image, "direction": observation["direction"]}


def make(name: str = "MiniGrid-Empty-8x8-v0") -> gymnasium.Env:
    import minigrid  # noqa: F401 (registers its environments, in each process that makes one)

    return Grid(gymnasium.make(name))


def main(total_steps: int = 300_000, savedir: str = "~/logs/torchbeast") -> None:
    run = torchbeast.train(make, total_steps=total_steps, savedir=savedir, discounting=0.97)
    print(f"{run.rundir}: mean return {run.figures.get('mean_episode_return')}")


if __name__ == "__main__":
    tyro.cli(main)
