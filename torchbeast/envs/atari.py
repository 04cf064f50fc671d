"""Atari with the preprocessing of the IMPALA paper, stepped by ALE's own C++ vector environment.

No-op starts, 4 frames an action, maximum of the last two, 84x84 grey, stack of 4. Rewards are the
game's own: what is clipped for learning is clipped in the learner.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TimeLimit

from libtorchbeast.environments import SyncEnvs
from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed

ENTRY_POINT = "ale_py.env:AtariEnv"
FRAME_SKIP = 4
NOOP = 0


class AtariEnvs:
    """`num_envs` copies of one game behind the `Environments` protocol."""

    def __init__(
        self,
        game: str,
        num_envs: int,
        seed: int | None = None,
        *,
        noop_max: int = 30,
        fire_reset: bool = True,
        episodic_life: bool = False,
        sticky_actions: float = 0.0,
        full_action_space: bool = False,
        max_episode_frames: int = 108_000,
    ) -> None:
        from ale_py.vector_env import AtariVectorEnv

        # `life_loss_info` flags a lost life as terminated and plays on; ALE's own `episodic_life`
        # would start a new game, so that no later life is ever seen.
        self._env: Any = AtariVectorEnv(
            game,
            num_envs,
            num_threads=1,
            frameskip=FRAME_SKIP,
            noop_max=noop_max,
            use_fire_reset=fire_reset,
            life_loss_info=episodic_life,
            repeat_action_probability=sticky_actions,
            full_action_space=full_action_space,
            max_num_frames_per_episode=max_episode_frames,
            reward_clipping=False,
            autoreset_mode="SameStep",
        )
        self.num_envs = num_envs
        self.num_actions = len(self._env.ale.get_action_set())
        self._seed = seed
        self._lives = np.zeros(num_envs, np.int32)
        self._counter = EpisodeCounter(num_envs)
        self._hit_time_limit = np.zeros(num_envs, np.bool_)

    def reset(self) -> Row:
        seeds = None
        if self._seed is not None:
            seeds = np.array([derive_seed(self._seed, i) for i in range(self.num_envs)])
        frame, info = self._env.reset(seed=seeds)
        self._lives = info["lives"]
        return self._counter.first_row(frame)

    def step(self, actions: np.ndarray) -> Row:
        extra = self._hit_time_limit
        # After a time limit ALE has reset the game already. The extra row is one more no-op start:
        # its action is ignored as the rule of the row asks, and no frame is shown twice.
        moves = np.where(extra, NOOP, actions)
        frame, reward, terminated, limit, info = self._env.step(moves)
        reward = np.where(extra, 0, reward)
        lives = info["lives"]
        lost_life = terminated & (lives < self._lives)  # after a game's end they are full again
        self._lives = lives
        if limit.any():
            frame[limit] = info["final_obs"][limit]
        self._hit_time_limit = limit
        ended = (terminated & ~lost_life) | extra
        return self._counter.row(frame, reward, terminated | extra, extra, actions, ended)

    def close(self) -> None:
        self._env.close()


def make_rendered(game: str, num_envs: int, seed: int | None, options: dict[str, Any]) -> SyncEnvs:
    """The same game and preprocessing through Gymnasium's wrappers, which can also render."""

    def make_env() -> Any:
        from ale_py.env import AtariEnv

        env: Any = AtariEnv(
            game,
            frameskip=1,
            repeat_action_probability=options["sticky_actions"],
            full_action_space=options["full_action_space"],
            render_mode="rgb_array",
        )
        env = AtariPreprocessing(env, noop_max=options["noop_max"], frame_skip=FRAME_SKIP)
        if options["fire_reset"]:
            env = _FireReset(env)
        env = FrameStackObservation(env, stack_size=4, padding_type="zero")
        return TimeLimit(env, max_episode_steps=options["max_episode_frames"] // FRAME_SKIP)

    return SyncEnvs(make_env, num_envs, seed)


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
