"""The scoreboard's tasks, and its peers with the packages that they need from PyPI."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

OURS = "ours"


@dataclass(frozen=True)
class Task:
    """An environment to train on, and when it counts as learnt."""

    env: str
    threshold: float
    """The mean return from which the task counts as learnt."""
    args: str = ""
    """Further flags of ours, where the plain command would not do."""
    our_env: str = ""
    """Flags of ours in place of --env, where the id is not registered by itself."""
    peers: bool = True
    """Whether peers can train on it."""
    package: str = ""
    """A package that it needs beside those of this project; peers have it."""


def make_minatar(game: str, threshold: float) -> Task:
    """A MinAtar game with only the actions that it needs."""
    kwargs = json.dumps({"game": game, "use_minimal_action_set": True})
    return Task(
        f"MinAtar/{game.title().replace('_', '')}-v1",
        threshold,
        "--total_steps 10000000",  # as many as its peers are set to
        our_env=f"--env minatar.gym:BaseEnv --env_kwargs '{kwargs}'",
        package="minatar",
    )


TASKS = {
    "pong": Task("PongNoFrameskip-v4", 18),
    "breakout": Task("BreakoutNoFrameskip-v4", 100),
    "spaceinvaders": Task("SpaceInvadersNoFrameskip-v4", 500),
    "qbert": Task("QbertNoFrameskip-v4", 2000),
    "minatar-breakout": make_minatar("breakout", 20),
    "minatar-spaceinvaders": make_minatar("space_invaders", 80),
    "cartpole": Task("CartPole-v1", 475),
    "lunarlander": Task("LunarLander-v3", 200, package="box2d"),
    "acrobot": Task("Acrobot-v1", -100),
    "halfcheetah": Task("HalfCheetah-v5", 1500, package="mujoco"),
    "memory": Task("Memory", 0.95, "--use_lstm", peers=False),
}


@dataclass(frozen=True)
class Peer:
    """A program in `benchmarks/peers/`, and what it needs from PyPI."""

    program: str
    packages: tuple[str, ...]
    args: str = ""
    imports_roms: bool = False
    """Whether its ale-py is too old to include the games, so that ours are copied."""

    @property
    def folder(self) -> Path:
        """Its virtual environment, shared by peers with the same program."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        return cache / "torchbeast-scoreboard" / self.program.removesuffix(".py")


SHARED_PACKAGES = ("torch==2.13.0", "box2d", "pygame", "imageio", "minatar")
SB3_PACKAGES = (
    *SHARED_PACKAGES,
    "stable-baselines3==2.9.*",
    "mujoco",
    "ale-py",
    "opencv-python-headless",
)
PEERS = {
    "sb3-ppo": Peer("sb3.py", SB3_PACKAGES, "--algo ppo"),
    "sb3-a2c": Peer("sb3.py", SB3_PACKAGES, "--algo a2c"),
    "sf-appo": Peer(
        "sample_factory_appo.py",
        (
            *SHARED_PACKAGES,
            "sample-factory==2.1.1",
            "mujoco<3",
            "shimmy[atari]<2",
            "ale-py<0.10",
            "opencv-python-headless<4.12",
        ),
        imports_roms=True,
    ),
    "rllib-appo": Peer(
        "rllib_appo.py",
        (*SHARED_PACKAGES, "ray[rllib]==2.60.*", "mujoco", "ale-py", "opencv-python-headless"),
    ),
}
