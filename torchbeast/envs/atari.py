"""Atari with the preprocessing of the IMPALA paper, stepped by ALE's own C++ vector environment.

No-op starts, 4 frames an action, maximum of the last two, 84x84 grey, stack of 4. Rewards are the
game's own: what is clipped for learning is clipped in the learner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from libtorchbeast.environments import SyncEnvs
from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import spec_of_space
from torchbeast.envs.spaces import observe

ENTRY_POINT = "ale_py.env:AtariEnv"
FRAME_SKIP = 4
FRAMES_PER_S = 60
NOOP = 0


KWARGS = (  # that --env_kwargs may have
    "full_action_space",
    "max_num_frames_per_episode",
    "repeat_action_probability",
    "mode",
    "difficulty",
)


@dataclass(frozen=True)
class Game:
    """A game, and how it is preprocessed."""

    name: str
    noop_max: int = 30
    fire_reset: bool = True
    sticky_actions: float = 0.0
    full_action_space: bool = False
    max_episode_frames: int = 108_000
    frame_stack: int = 4
    mode: int | None = None
    difficulty: int | None = None


class AtariEnvs:
    """`num_envs` copies of one game behind the `Environments` protocol."""

    def __init__(
        self, game: Game, num_envs: int, seed: int | None = None, episodic_life: bool = False
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        # `life_loss_info` flags a lost life as terminated and plays on; ALE's own `episodic_life`
        # would start a new game, so that no later life is ever seen.
        self._env: Any = AtariVectorEnv(
            game.name,
            num_envs,
            num_threads=1,
            frameskip=FRAME_SKIP,
            stack_num=game.frame_stack,
            noop_max=game.noop_max,
            use_fire_reset=game.fire_reset,
            life_loss_info=episodic_life,
            repeat_action_probability=game.sticky_actions,
            full_action_space=game.full_action_space,
            max_num_frames_per_episode=game.max_episode_frames,
            reward_clipping=False,
            autoreset_mode="SameStep",
        )
        self.num_envs = num_envs
        self.observation_spec = spec_of_space(self._env.single_observation_space)
        self.action_spec = spec_of_space(self._env.single_action_space)
        self._seed = seed
        self._begins = np.zeros(num_envs, np.int32)  # the frame with which the game began
        self._counter = EpisodeCounter(num_envs)
        self._hit_time_limit = np.zeros(num_envs, np.bool_)

    def reset(self) -> Row:
        seeds = None
        if self._seed is not None:
            seeds = np.array([derive_seed(self._seed, i) for i in range(self.num_envs)])
        frame, info = self._env.reset(seed=seeds)
        self._begins = _first_frame(info)
        return self._counter.first_row(frame)

    def step(self, actions: np.ndarray) -> Row:
        extra = self._hit_time_limit
        # After a time limit ALE has reset the game already. The extra row is one more no-op start:
        # its action is ignored as the rule of the row asks, and no frame is shown twice.
        moves = np.where(extra, NOOP, actions)
        frame, reward, terminated, limit, info = self._env.step(moves)
        reward = np.where(extra, 0, reward)
        # A lost life is an end only with `life_loss_info`; then, unlike after a game's end, ALE has
        # not reset the game. Lives do not tell: some games end with more than they begin with.
        begins = _first_frame(info)
        lost_life = terminated & (begins == self._begins)
        self._begins = begins
        if limit.any():
            frame[limit] = info["final_obs"][limit]
        self._hit_time_limit = limit
        ended = (terminated & ~lost_life) | extra
        return self._counter.row(frame, reward, terminated | extra, extra, actions, ended)

    def close(self) -> None:
        self._env.close()


def _first_frame(info: dict[str, Any]) -> np.ndarray:
    return info["frame_number"] - info["episode_frame_number"]


def make_single_games(
    game: Game, num_envs: int, seed: int | None, wrappers: Sequence[Any], render: bool
) -> SyncEnvs:
    """The same game and preprocessing through Gymnasium's wrappers; slower, but they can render.

    `wrappers` are put around what is preprocessed, and inside of the stack of frames.
    """

    def make_env() -> Any:
        from ale_py.env import AtariEnv

        env: Any = AtariEnv(
            game.name,
            frameskip=1,
            mode=game.mode,
            difficulty=game.difficulty,
            repeat_action_probability=game.sticky_actions,
            full_action_space=game.full_action_space,
            render_mode="rgb_array" if render else None,
        )
        env = AtariPreprocessing(env, noop_max=game.noop_max, frame_skip=FRAME_SKIP)
        if game.fire_reset:
            env = _FireReset(env)
        for wrapper in wrappers:
            env = wrapper(env)
        env = FrameStackObservation(env, stack_size=game.frame_stack, padding_type="zero")
        env = TimeLimit(env, max_episode_steps=game.max_episode_frames // FRAME_SKIP)
        env.metadata = {**env.metadata, "render_fps": FRAMES_PER_S // FRAME_SKIP}
        return env

    return SyncEnvs(make_env, num_envs, seed, observe, masks=True)  # a wrapper may have them


class _FireReset(gymnasium.Wrapper):
    """Press FIRE once after each reset, for the games that wait for it."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        frame, info = self.env.reset(**kwargs)
        meanings = self.env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        if "FIRE" in meanings:
            frame, _, over, cut, info = self.env.step(meanings.index("FIRE"))
            if over or cut:
                return self.env.reset(**kwargs)
        return frame, info
