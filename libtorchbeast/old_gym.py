"""Adapts environments of old Gym, and others that are not Gymnasium's, to its interface."""

import inspect
import sys
from typing import Any


class OldGym:
    """Gives an old-style environment (reset -> frame, step -> 4 values) the Gymnasium interface.

    It also takes environments of the new style that are not derived from Gymnasium's.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._takes_seed = takes_keyword(env.reset, "seed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def unwrapped(self) -> Any:
        return getattr(self._env, "unwrapped", self._env)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        options = {}
        if seed is not None:
            if _takes(getattr(self._env, "seed", None), seed):
                self._env.seed(seed)
            elif self._takes_seed:  # as in the last versions of Gym
                options["seed"] = seed
        result = self._env.reset(**options)
        # A pair with a dict is Gymnasium's (observation, info).
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, ...]:
        result = self._env.step(action)
        if len(result) != 4:
            return result
        frame, reward, done, info = result
        limit = bool(done) and isinstance(info, dict) and bool(info.get("TimeLimit.truncated"))
        return frame, reward, bool(done) and not limit, limit, info

    def close(self) -> None:
        if callable(getattr(self._env, "close", None)):
            self._env.close()


def _takes(function: Any, argument: Any) -> bool:
    """Whether `function` can be called with `argument`; True if its signature is not known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(argument)
    except TypeError:  # procgen's seed() takes no argument: levels are chosen when it is made
        return False
    except ValueError:
        return True
    return True


def takes_keyword(function: Any, name: str) -> bool:
    """Whether `function` can be called with `name=...`; False if its signature is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return False
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def as_gymnasium(env: Any) -> Any:
    """`env` if it is a Gymnasium environment, else a thin adapter around it."""
    gymnasium = sys.modules.get("gymnasium")  # imported already if `env` is one of its environments
    is_gymnasium = gymnasium is not None and isinstance(env, gymnasium.Env)
    return env if is_gymnasium else OldGym(env)
