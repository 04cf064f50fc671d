"""Flags given by a Python program: the same names and rules as on the command line."""

import dataclasses
import json
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchbeast.envs.names import did_you_mean
from torchbeast.errors import UsageError
from torchbeast.run.flags import TrainingFlags


def check_values(flags_class: type[TrainingFlags], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with the types that the flags have; UsageError for names and types that are not.

    `env_kwargs` may be a dict, `imports` and the like a list of names.
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
    """The value as this kind; None if it is none."""
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
