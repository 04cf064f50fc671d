"""Several Atari games with one agent: the environments of a group play different games.

python examples/many_games.py
"""

from typing import Any

import ale_py
import gymnasium
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import torchbeast

GAMES = ("Pong", "Breakout", "SpaceInvaders", "Seaquest")


class Score(gymnasium.Wrapper):
    """Logs each game's score under a name of its own: info/Pong ..."""

    def __init__(self, env: gymnasium.Env, game: str) -> None:
        super().__init__(env)
        self._game, self._score = game, 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self._score = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self._score += float(reward)
        return observation, reward, terminated, truncated, {self._game: self._score}


def make_game(game: str) -> gymnasium.Env:
    """Make one game with the 18 actions that all games share, so that one policy plays all."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, full_action_space=True)
    return FrameStackObservation(Score(AtariPreprocessing(env), game), stack_size=4)


def make(num_envs: int, autoreset_mode: AutoresetMode) -> SyncVectorEnv:
    """Make a whole group: its environments play the games in turn."""
    games = [GAMES[i % len(GAMES)] for i in range(num_envs)]
    return SyncVectorEnv(
        [lambda game=game: make_game(game) for game in games],  # type: ignore[misc]
        autoreset_mode=autoreset_mode,
    )


def main(total_steps: int = 20_000_000, savedir: str = "~/logs/torchbeast") -> None:
    run = torchbeast.train(
        make,
        envs_per_actor=2 * len(GAMES),  # each game twice in each group
        reward_clipping="abs_one",
        total_steps=total_steps,
        savedir=savedir,
    )
    scores = {game: run.figures.get(f"info/{game}") for game in GAMES}
    print(f"{run.rundir}: {scores}")


if __name__ == "__main__":
    tyro.cli(main)
