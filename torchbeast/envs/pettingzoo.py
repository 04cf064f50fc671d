"""Games of several agents, PettingZoo's parallel environments, behind the `Environments` protocol.

Each agent of each game is one environment of the group, and all of them share one policy. Agents
come and go: while one is not in the game, nothing is learnt from its rows (`truncated`).
PettingZoo itself is not imported: any environment with its interface will do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from libtorchbeast.action_masks import ActionMasks, find_masks
from libtorchbeast.episode_info import InfoSums, add_info
from libtorchbeast.groups import HEARTBEAT, Rebuilds, close_failed
from libtorchbeast.observations import FrameCheck, stack
from libtorchbeast.rows import EpisodeCounter, Row
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import (
    ACTION_MASK,
    UnknownSpace,
    agents_action,
    canonical,
    count_actions,
    environments_action,
    spec_of_space,
)
from libtorchbeast.tree import map_tree
from torchbeast.envs.spaces import observe
from torchbeast.errors import UsageError


def has_agents(env: Any) -> bool:
    """Whether it is a game of several agents: its spaces are methods that take an agent."""
    return all(callable(getattr(env, f"{what}_space", None)) for what in ("observation", "action"))


class ParallelEnvs:
    """A group of `num_envs` agents: those of the first game, then those of the second, and so on.

    If `num_envs` is no multiple of the agents of a game, the places left over stay empty. When all
    agents of a game are out, it is reset: at once after a true end, in one extra row if a time
    limit ended it for one of them.
    """

    def __init__(
        self, make_game: Callable[[], Any], num_envs: int, seed: int | None, whole_games: bool
    ) -> None:
        """With `whole_games`, `num_envs` is changed to a multiple of the agents of a game."""
        first = make_game()
        self.num_agents = _count_agents(first)
        self.agents = [str(agent) for agent in first.possible_agents]
        if whole_games:
            num_envs = max(1, num_envs // self.num_agents) * self.num_agents
        check_agents(self.num_agents, num_envs)
        self.num_envs = num_envs
        num_games = num_envs // self.num_agents
        self.envs = [first]
        while len(self.envs) < num_games:
            HEARTBEAT.get()()  # making all games may exceed the time limit for one
            self.envs.append(make_game())
        self._make_game = make_game
        self._seed = seed
        self._observation_spec, self.taken_action = _shared_spaces(first)
        self.action_spec: Any = agents_action(self.taken_action)
        self._counter = EpisodeCounter(num_envs, self.action_spec)
        self._masks: ActionMasks | None = None
        self._check = FrameCheck()
        self._blank: Any = None  # the observation of agents that are not in the game
        self._frames: list[Any] = []
        self._alive: list[set[Any]] = [set() for _ in self.envs]
        self._needs_reset = [False] * num_games
        self._num_steps = 0
        self._rebuilds = [Rebuilds(f"Game {i}") for i in range(num_games)]
        self._info: InfoSums = {}
        self.game_over = np.zeros(num_envs, np.bool_)
        """[num_envs]: whether the agent's game ended with the newest row; true in empty places."""

    @property
    def observation_spec(self) -> Any:
        """The spec of the agents' observation; from `reset` on with their action mask, if any."""
        spec = self._observation_spec
        return spec if self._masks is None else self._masks.spec(spec)

    def reset(self) -> Row:
        self._frames = [None] * self.num_envs
        for game in range(len(self.envs)):
            HEARTBEAT.get()()
            try:
                self._start(game, self._seed_of(game))
            except Exception as error:
                self._rebuild(game, error)
        self._frames[len(self.envs) * self.num_agents :] = self._idle * [self._blank]
        return self._counter.first_row(self._join())

    def step(self, actions: Any) -> Row:
        self._num_steps += 1
        self._reward = np.zeros(self.num_envs, np.float64)
        # In places without an agent in the game there is no transition.
        self._done = np.ones(self.num_envs, np.bool_)
        self._truncated = np.ones(self.num_envs, np.bool_)
        self.game_over[:] = False
        self.game_over[self.num_envs - self._idle :] = True
        moves = environments_action(self.taken_action, actions)
        for game in range(len(self.envs)):
            try:
                self._step(game, moves)
            except Exception as error:
                self._rebuild(game, error)
                slots = self._slots(game)
                for i in slots:
                    self._counter.forget(i)
                self._reward[slots] = 0.0
                self._done[slots] = self._truncated[slots] = True
        return self._counter.row(self._join(), self._reward, self._done, self._truncated, actions)

    def take_info(self) -> InfoSums:
        """Sums of the numbers in `info`, over the episodes that ended since the last call."""
        info, self._info = self._info, {}
        return info

    def close(self) -> None:
        for env in self.envs:
            env.close()

    # One game.

    def _step(self, game: int, moves: Any) -> None:
        env, alive = self.envs[game], self._alive[game]
        if self._needs_reset[game]:
            self._start(game)
            return
        chosen = {a: self._pick(moves, i) for i, a in self._agents(game) if a in alive}
        frames, rewards, terminations, limits, infos = env.step(chosen)
        hit_limit = False
        for i, agent in self._agents(game):
            info = infos.get(agent, {})
            if agent not in alive:
                if agent in env.agents:  # it joins: no transition led here
                    alive.add(agent)
                    self._frames[i] = self._see(frames[agent], info)
                continue
            ended = bool(terminations.get(agent))
            limit = not ended and (bool(limits.get(agent)) or agent not in env.agents)
            self._reward[i] = _check_reward(rewards.get(agent, 0.0))
            self._done[i], self._truncated[i] = ended, False
            self._frames[i] = self._blank if ended else self._see(frames[agent], info, limit)
            if ended or limit:
                alive.remove(agent)
                add_info(self._info, info)
                hit_limit |= limit
        if not alive and hit_limit:  # this row shows the last observations
            self._needs_reset[game] = True
        elif not alive:
            self._start(game)

    def _start(self, game: int, seed: int | None = None) -> None:
        """Start a new episode of a game; agents that are not in it get a blank observation."""
        env = self.envs[game]
        frames, infos = env.reset(seed=seed)
        self._needs_reset[game] = False
        self._alive[game] = set(env.agents)
        if not self._alive[game]:
            raise ValueError("A game must have agents after reset, got none.")
        for i, agent in self._agents(game):
            is_there = agent in self._alive[game]
            self._frames[i] = self._see(frames[agent], infos.get(agent, {})) if is_there else None
        for i in self._slots(game):
            if self._frames[i] is None:
                self._frames[i] = self._blank
        self.game_over[self._slots(game)] = True

    def _see(self, frame: Any, info: Any, is_last: bool = False) -> Any:
        """An agent's observation as arrays, with its mask if agents have one."""
        if self._blank is None:
            self._masks = find_masks(None, frame, info, self.action_spec)
        if self._masks is not None:
            frame = self._masks.add(None, frame, info, is_last)
        frame = observe(frame)
        self._check(frame)
        if self._blank is None:
            self._blank = map_tree(np.zeros_like, frame)
            if self._masks is not None:
                self._blank[ACTION_MASK][:] = True
        return frame

    def _rebuild(self, game: int, error: Exception) -> None:
        if isinstance(error, UnknownSpace):
            raise error
        rebuilds = self._rebuilds[game]

        def attempt() -> None:
            close_failed(self.envs[game])
            self.envs[game] = self._make_game()
            self._start(game, self._seed_of(game, rebuilds.num_rebuilds))

        rebuilds.retry(error, self._num_steps, attempt)

    # Places in the group.

    @property
    def _idle(self) -> int:
        return self.num_envs - len(self.envs) * self.num_agents

    def _slots(self, game: int) -> range:
        return range(game * self.num_agents, (game + 1) * self.num_agents)

    def _agents(self, game: int) -> list[tuple[int, Any]]:
        """Each agent of a game, after its place in the group."""
        agents = self.envs[game].possible_agents
        return list(zip(self._slots(game), agents, strict=True))

    def _seed_of(self, *path: int) -> int | None:
        return None if self._seed is None else derive_seed(self._seed, *path)

    def _pick(self, moves: Any, i: int) -> Any:
        if count_actions(self.action_spec):
            return int(moves[i])
        return map_tree(lambda _, array: array[i], self.action_spec, moves)

    def _join(self) -> Any:
        return map_tree(lambda *arrays: stack(list(arrays)), *self._frames)


def check_agents(num_agents: int, num_envs: int) -> None:
    """UsageError unless a group has places for all agents of a game."""
    if num_agents > num_envs:
        raise UsageError(
            f"A group of environments must have places for all {num_agents} agents of a game, got "
            f"{num_envs}; leave --envs_per_actor out (--envs_per_server of polybeast_env), or "
            f"raise it to a multiple of {num_agents} (of {2 * num_agents})."
        )


def _count_agents(game: Any) -> int:
    if callable(getattr(game, "agent_iter", None)):
        raise UsageError(
            f"{type(game).__name__} lets one agent act at a time, and games of several agents must "
            "be parallel ones; make it one with pettingzoo.utils.aec_to_parallel."
        )
    agents = getattr(game, "possible_agents", None)
    if not agents:
        raise UsageError(
            f"{type(game).__name__} must list in possible_agents all agents that may ever play, "
            f"got {'none' if agents is None else 'an empty list'}."
        )
    return len(agents)


def _shared_spaces(game: Any) -> tuple[Any, Any]:
    """The specs of observation and action; UsageError unless all agents have the same."""
    first, *others = game.possible_agents
    specs = []
    for what in ("observation", "action"):
        space_of = getattr(game, f"{what}_space")
        spec = spec_of_space(space_of(first))
        for agent in others:
            another = spec_of_space(space_of(agent))
            is_same = canonical(another) == canonical(spec) and (
                what != "action" or another == spec
            )
            if not is_same:
                raise UsageError(
                    f"All agents share one policy and must have the same {what} space, got "
                    f"{space_of(first)} for {first} and {space_of(agent)} for {agent}; wrap the "
                    "game so that they have."
                )
        specs.append(spec)
    return specs[0], specs[1]


def _check_reward(reward: Any) -> float:
    if not np.isfinite(reward):
        raise ValueError(f"The reward must be a finite float32, got {reward}.")
    return reward
