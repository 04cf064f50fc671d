"""Games of several agents with PettingZoo's parallel interface, which is not imported."""

import numpy as np
from gymnasium import spaces


class Relay:
    """Who is there at which time, and how each agent leaves, is written in a script.

    `script` maps an agent to (first step, last step, how it ends): an observation is [agent, time].
    The reward is the time; actions must come from those who are there, and from nobody else.
    """

    metadata: dict = {}  # noqa: RUF012
    render_mode = None

    def __init__(self, script):
        self.possible_agents = list(script)
        self._script = script
        self.resets = 0

    def observation_space(self, agent):
        return spaces.Box(0.0, 100.0, (2,))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.resets += 1
        self._time = 0
        self.agents = [a for a, (first, _, _) in self._script.items() if first == 0]
        return self._observe(self.agents), {a: {} for a in self.agents}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents), f"{actions} but {self.agents}"
        self._time += 1
        here = list(self.agents)
        ends = {a: self._script[a][2] for a in here if self._script[a][1] == self._time}
        new = [a for a, (first, _, _) in self._script.items() if first == self._time]
        self.agents = [a for a in here if a not in ends] + new
        return (
            self._observe(here + new),
            dict.fromkeys(here, float(self._time)),
            {a: ends.get(a) == "terminated" for a in here},
            {a: ends.get(a) == "truncated" for a in here},
            {a: {} for a in here},
        )

    def close(self):
        pass

    def _observe(self, agents):
        index = self.possible_agents.index
        return {a: np.array([index(a), self._time], np.float32) for a in agents}


class Signs:
    """Two agents see a number each and should name the other's; a mask rules one answer out.

    Rewards are shared: what one of them does right pays both. Episodes have 5 steps.
    """

    metadata: dict = {}  # noqa: RUF012
    render_mode = None
    possible_agents = ("left", "right")

    def observation_space(self, agent):
        parts = {"mine": spaces.Discrete(3), "others": spaces.Discrete(3)}
        return spaces.Dict({**parts, "action_mask": spaces.MultiBinary(4)})

    def action_space(self, agent):
        return spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "_random"):
            self._random = np.random.default_rng(seed)
        self._time = 0
        self.agents = list(self.possible_agents)
        return self._observe(), {a: {} for a in self.agents}

    def step(self, actions):
        assert all(0 <= action < 3 for action in actions.values()), "masked"
        right = sum(actions[a] == self._seen[a]["others"] for a in self.agents)
        self._time += 1
        agents, over = self.agents, self._time == 5
        frames = self._observe()
        self.agents = [] if over else agents
        rewards = dict.fromkeys(agents, right / 2)
        flags = dict.fromkeys(agents, over), dict.fromkeys(agents, False)
        return frames, rewards, *flags, {a: {} for a in agents}

    def close(self):
        pass

    def _observe(self):
        left, right = self._random.integers(3, size=2).tolist()
        mask = np.array([1, 1, 1, 0], np.int8)
        self._seen = {
            "left": {"mine": left, "others": right, "action_mask": mask},
            "right": {"mine": right, "others": left, "action_mask": mask},
        }
        return dict(self._seen)


class Turns(Relay):
    """One that lets agents act in turn."""

    def agent_iter(self):
        yield from self.agents


class Unequal(Relay):
    """Its agents have different actions."""

    def action_space(self, agent):
        return spaces.Discrete(3 + self.possible_agents.index(agent))


SCRIPT = {"a": (0, 3, "terminated"), "b": (0, 5, "terminated")}


def turns():
    return Turns(SCRIPT)


def unequal():
    return Unequal(SCRIPT)


def relay():
    return Relay(SCRIPT)


def crowd():
    """Ten agents; the last two leave early."""
    return Relay({f"agent {i}": (0, 3 if i >= 8 else 5, "terminated") for i in range(10)})
