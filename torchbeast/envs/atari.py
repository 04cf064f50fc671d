"""Atari with the preprocessing of the IMPALA paper, stepped by ALE's own C++ vector environment.

No-op starts, 4 frames an action, maximum of the last two, 84x84 grey, stack of 4. Rewards are the
game's own; the learner clips them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import spec_of_space
from libtorchbeast.sync_envs import SyncEnvs
from torchbeast.envs.spaces import observe
from torchbeast.envs.wrappers import wrap

ENTRY_POINT = "ale_py.env:AtariEnv"
FRAME_SKIP = 4
FRAMES_PER_S = 60
NOOP = 0


KWARGS = (  # keys that --env_kwargs may have
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

        # With `life_loss_info` a lost life is flagged as terminated, and ALE plays on; its own
        # `episodic_life` would start a new game, so that no later life is ever seen.
        self._env: Any = AtariVectorEnv(
            game.name,
            num_envs,
            num_threads=1,
            frameskip=FRAME_SKIP,
            stack_num=game.frame_stack,
            noop_max=game.noop_max,
            use_fire_reset=game.fire_reset,
            life_loss_info=True,
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
        self._episodic_life = episodic_life
        names = [action.name for action in self._env.ale.get_action_set()]
        self._fire = names.index("FIRE") if game.fire_reset and "FIRE" in names else None
        self._lost_life = np.zeros(num_envs, np.bool_)  # whether the last step lost a life
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
        # After a time limit ALE has reset the game already. The extra row is one more no-op: the
        # agent's action is ignored, as for any such row, and no frame is shown twice.
        moves = np.where(extra, NOOP, actions)
        # Games that wait for FIRE do so after each lost life; an agent may never learn to press it.
        fires = self._lost_life & ~extra if self._fire is not None else np.zeros_like(extra)
        moves = np.where(fires, self._fire or NOOP, moves)
        frame, reward, terminated, limit, info = self._env.step(moves)
        reward = np.where(extra, 0, reward)
        # A lost life, and not the game's end, if ALE has not reset the game. The number of lives
        # does not tell: some games end with more than they begin with.
        begins = _first_frame(info)
        self._lost_life = terminated & (begins == self._begins)
        self._begins = begins
        if limit.any():
            frame[limit] = info["final_obs"][limit]
        self._hit_time_limit = limit
        ended = (terminated & ~self._lost_life) | extra
        if not self._episodic_life:
            return self._counter.row(frame, reward, ended, extra, actions)
        first = extra | fires  # rows of a new episode that do not result from the agent's action
        return self._counter.row(frame, reward, terminated | first, first, actions, ended)

    def close(self) -> None:
        self._env.close()


def _first_frame(info: dict[str, Any]) -> np.ndarray:
    return info["frame_number"] - info["episode_frame_number"]


def make_single_games(
    game: Game, num_envs: int, seed: int | None, wrappers: Sequence[Any], render: bool
) -> SyncEnvs:
    """The same game and preprocessing through Gymnasium's wrappers; slower, but they can render.

    `wrappers` go between the preprocessing and the stack of frames.
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
        env = wrap(env, wrappers)
        env = FrameStackObservation(env, stack_size=game.frame_stack, padding_type="zero")
        env = TimeLimit(env, max_episode_steps=game.max_episode_frames // FRAME_SKIP)
        env.metadata = {**env.metadata, "render_fps": FRAMES_PER_S // FRAME_SKIP}
        return env

    return SyncEnvs(make_env, num_envs, seed, observe, masks=True)  # a wrapper may have masks


class _FireReset(gymnasium.Wrapper):
    """Press FIRE once after each reset and each lost life, for the games that wait for it."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        names = self.env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = names.index("FIRE") if "FIRE" in names else None
        self._lives, self._lost_life = 0, False

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        frame, info = self.env.reset(**kwargs)
        if self._fire is not None:
            frame, _, over, cut, info = self.env.step(self._fire)
            if over or cut:
                frame, info = self.env.reset(**kwargs)
        self._lives, self._lost_life = info.get("lives", 0), False
        return frame, info

    def step(self, action: Any) -> Any:
        fires = self._lost_life and self._fire is not None
        frame, reward, over, cut, info = self.env.step(self._fire if fires else action)
        lives = info.get("lives", 0)
        self._lives, self._lost_life = lives, lives < self._lives
        return frame, reward, over, cut, info
