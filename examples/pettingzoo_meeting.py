"""A game of several agents: three walkers on a line want to meet. All share one policy.

pip install 'torchbeast[pettingzoo]'
python -m torchbeast.polybeast --env examples.pettingzoo_meeting:Meeting --total_steps 300000
python -m torchbeast.polybeast --mode test --env examples.pettingzoo_meeting:Meeting

Any parallel environment of PettingZoo is named the same way: `--env package.module:parallel_env`.
"""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

PLACES = 7
MAX_STEPS = 12

Each = dict[str, Any]


class Meeting(ParallelEnv):
    """An agent sees where it is and where the two others are, and goes left, stays or goes right.

    When all are in one place, the game ends and each agent gets 1; every other step costs 0.05. An
    action mask keeps agents from walking past the ends of the line.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "meeting_v0", "render_modes": []}

    def __init__(self) -> None:
        self.possible_agents = ["ann", "bob", "eve"]
        self.agents: list[str] = []
        self.render_mode = None
        places = spaces.Box(0, PLACES - 1, (3,), np.float32)
        self._seen = spaces.Dict({"observation": places, "action_mask": spaces.MultiBinary(3)})
        self._moves = spaces.Discrete(3)
        self._random = np.random.default_rng()

    def observation_space(self, agent: str) -> spaces.Dict:
        return self._seen

    def action_space(self, agent: str) -> spaces.Discrete:
        return self._moves

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Each, Each]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._places = dict(zip(self.agents, self._random.permutation(PLACES)[:3], strict=True))
        self._time = 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: Each) -> tuple[Each, Each, Each, Each, Each]:
        for agent, action in actions.items():
            self._places[agent] += action - 1
            if not 0 <= self._places[agent] < PLACES:
                raise ValueError(f"{agent} cannot walk past an end.")
        self._time += 1
        met = len(set(self._places.values())) == 1
        late = not met and self._time == MAX_STEPS
        agents, frames = self.agents, self._observe()
        if met or late:
            self.agents = []
        return (
            frames,
            dict.fromkeys(agents, 1.0 if met else -0.05),
            dict.fromkeys(agents, met),
            dict.fromkeys(agents, late),
            {agent: {"met": float(met)} for agent in agents},  # averaged in the logs
        )

    def _observe(self) -> Each:
        return {agent: self._seen_by(agent) for agent in self.agents}

    def _seen_by(self, agent: str) -> Each:
        place = self._places[agent]
        others = sorted(self._places[other] for other in self.possible_agents if other != agent)
        mask = np.array([place > 0, True, place < PLACES - 1], np.int8)
        return {"observation": np.array([place, *others], np.float32), "action_mask": mask}
