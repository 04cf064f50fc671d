"""An environment with whatever spaces, which insists on actions of its own."""

import gymnasium
from gymnasium import spaces


class AnySpace(gymnasium.Env):
    """Observations are drawn from their space; the reward is 1 if the agent chose well."""

    def __init__(self, observation_space, action_space, length=5):
        self.observation_space = observation_space
        self.action_space = action_space
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        self._time += 1
        return self.observation_space.sample(), 1.0, self._time == self._length, False, {}


class Mixed(gymnasium.Env):
    """A choice and an aim, told by a dict; what must be done is seen, and pays one at most."""

    def __init__(self):
        self.observation_space = spaces.Dict(
            {"side": spaces.Discrete(2, start=1), "place": spaces.Box(-1.0, 1.0, (2,))}
        )
        self.action_space = spaces.Dict(
            {"side": spaces.Discrete(2, start=1), "aim": spaces.Box(-2.0, 2.0, (2,))}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return self._observe(), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        error = abs(action["aim"] - self._seen["place"]).mean()
        reward = float(action["side"] == self._seen["side"]) * max(0.0, 1.0 - float(error))
        self._time += 1
        return self._observe(), reward, self._time == 10, False, {}

    def _observe(self):
        side = 1 + int(self.np_random.integers(2))
        place = self.np_random.uniform(-1, 1, 2).astype("float32")
        self._seen = {"side": side, "place": place}
        return dict(self._seen)
