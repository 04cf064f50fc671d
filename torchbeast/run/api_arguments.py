"""Turns the arguments of `torchbeast.train` and `evaluate` into flags.

Environment and model are names, or classes and functions of the program's own; all other flags have
the same names and rules as on the command line.
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from torch import nn

from torchbeast import user_code
from torchbeast.envs.names import did_you_mean
from torchbeast.envs.options import split_names
from torchbeast.errors import UsageError
from torchbeast.run.flags import TrainingFlags

Wrappers = str | Sequence[str | Callable[..., Any]]

MAIN = "__main__:"


def name_code(env: Any, model: Any, wrappers: Wrappers) -> tuple[dict[str, str], dict[str, Any]]:
    """Flags that name these arguments, and the objects that other processes cannot import.

    The latter are for `user_code.offer`. An argument that is None or empty has no flag.
    """
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
    """The spec with the class itself as entry point, if its name is in the main module."""
    if not isinstance(spec.entry_point, str) or not spec.entry_point.startswith(MAIN):
        return spec
    spec = copy.copy(spec)
    spec.entry_point = load_env_creator(str(spec.entry_point))  # type: ignore[assignment]
    return spec


def _name(thing: Any, objects: dict[str, Any]) -> str:
    name, can_import = user_code.name_of(thing)
    if can_import:
        return name
    if objects.setdefault(name, thing) is not thing:
        raise UsageError(
            f"Two different objects are called {name}; give each a name of its own with def or "
            "class."
        )
    return name


# -------------------------------------------------------------------------------------------- flags


def check_values(flags_class: type[TrainingFlags], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values to the flags' types; UsageError for unknown names and wrong types.

    `env_kwargs` may be a dict; flags with several names, such as `imports`, may be lists.
    """
    hints = get_type_hints(flags_class)
    known = [field.name for field in dataclasses.fields(flags_class) if field.name != "sources"]
    for name in values:
        if name not in known:
            raise UsageError(f"There is no flag {name!r}{did_you_mean(name, known) or '.'}")
    return {name: _convert(name, hints[name], value) for name, value in values.items()}


def _convert(name: str, hint: Any, value: Any) -> Any:
    if name == "env_kwargs" and isinstance(value, dict):
        return _as_json(value)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if str in kinds and isinstance(value, (list, tuple)):
        value = ",".join(str(part) for part in value)
    for kind in kinds:
        converted = _fit(kind, value)
        if converted is not None or (kind is NoneType and value is None):
            return converted
    rule = " or ".join(_describe(kind) for kind in kinds)
    raise UsageError(f"{name} must be {rule}, got {value!r}.")


def _fit(kind: Any, value: Any) -> Any:
    """The value converted to the type `kind`; None if it does not fit."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if kind is int and is_number and (isinstance(value, Integral) or value == value // 1):
        return int(value)  # also 1e6, which is what people write
    if kind is float and is_number:
        return float(value)
    if kind is Path and isinstance(value, (str, Path)):
        return Path(value)
    return value if kind in (bool, str) and isinstance(value, kind) else None


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    names = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}
    return names.get(kind, "a path" if kind is Path else "None")


def _as_json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"env_kwargs must be numbers, strings, lists and dicts, got {value} ({error}); give "
            "env a function of no arguments that makes the environment with the rest."
        ) from error
