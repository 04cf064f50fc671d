"""What a Python program says of its environment and model: names, or classes and functions."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from torch import nn

from torchbeast import own_code
from torchbeast.envs.options import split_names
from torchbeast.errors import UsageError

Wrappers = str | Sequence[str | Callable[..., Any]]

MAIN = "__main__:"


def name_code(env: Any, model: Any, wrappers: Wrappers) -> tuple[dict[str, str], dict[str, Any]]:
    """The flags that say the same, as strings, and the objects behind those names that only this
    program has: for `own_code.offer`. What is None or empty has no flag."""
    objects: dict[str, Any] = {}
    flags: dict[str, str] = {}
    if env is not None:
        flags["env"] = _name_env(env, objects)
    if model is not None:
        flags["model"] = model if isinstance(model, str) else _name_model(model, objects)
    if wrappers:
        parts = split_names(wrappers) if isinstance(wrappers, str) else wrappers
        names = [part if isinstance(part, str) else _name(part, objects) for part in parts]
        flags["wrappers"] = ",".join(names)
    return flags, objects


def _name_env(env: Any, objects: dict[str, Any]) -> str:
    if isinstance(env, str):
        env = gymnasium.registry.get(env, env)
    if isinstance(env, EnvSpec):  # registered by this program, or by what it has imported
        objects[env.id] = _with_entry_point(env)
        return env.id
    if isinstance(env, str):
        return env
    if not callable(env):
        raise UsageError(
            f"env must be a name, or a class or function that makes one environment at each call, "
            f"got {env}; give lambda: ... for one with arguments."
        )
    return _name(env, objects)


def _name_model(model: Any, objects: dict[str, Any]) -> str:
    if isinstance(model, nn.Module) or not callable(model):
        raise UsageError(
            f"model must be a name, or a class or function that makes a torch.nn.Module, got "
            f"{type(model).__name__}; each process makes its own."
        )
    return _name(model, objects)


def _with_entry_point(spec: EnvSpec) -> EnvSpec:
    """With the class in place of a name that only this program knows."""
    if not isinstance(spec.entry_point, str) or not spec.entry_point.startswith(MAIN):
        return spec
    spec = copy.copy(spec)
    spec.entry_point = load_env_creator(str(spec.entry_point))  # type: ignore[assignment]
    return spec


def _name(thing: Any, objects: dict[str, Any]) -> str:
    name, can_import = own_code.name_of(thing)
    if can_import:
        return name
    if objects.setdefault(name, thing) is not thing:
        raise UsageError(
            f"Two different objects are called {name}; give each a name of its own with def or "
            "class."
        )
    return name
