"""What all peers share: environments by the scoreboard's ids, and the command line."""

import argparse
import contextlib
from typing import Any

import gymnasium
import numpy as np

# The ids of the same environments in Gymnasium before 1.0.
OLD_IDS = {"HalfCheetah-v5": "HalfCheetah-v4", "LunarLander-v3": "LunarLander-v2"}
MINATAR = "MinAtar/"


def parse_arguments(*names: str) -> argparse.Namespace:
    """Parse --env, --seed, --out, and required arguments with these names."""
    parser = argparse.ArgumentParser()
    for name in ("env", "out", *names):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


def is_atari(name: str) -> bool:
    return "NoFrameskip" in name


def is_minatar(name: str) -> bool:
    return name.startswith(MINATAR)


def make_env(name: str, **kwargs: Any) -> gymnasium.Env:
    """The environment without preprocessing, except that MinAtar's channels become floats."""
    if is_atari(name):
        with contextlib.suppress(ImportError, AttributeError):  # an older ale-py registers itself
            import ale_py

            gymnasium.register_envs(ale_py)
    if is_minatar(name) and name not in gymnasium.registry:  # older Gymnasiums do this
        import minatar.gym

        minatar.gym.register_envs()
    if name not in gymnasium.registry:
        name = OLD_IDS.get(name, name)
    env = gymnasium.make(name, **kwargs)
    return Floats(env) if is_minatar(name) else env


class Floats(gymnasium.ObservationWrapper):
    """Converts bools [height, width, channels] to floats 0 and 1."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        shape = env.observation_space.shape
        assert shape is not None
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, shape, np.float32)

    def observation(self, observation: Any) -> Any:
        return observation.astype(np.float32)
