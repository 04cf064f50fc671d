"""What rows and actions look like: nests of dtypes and shapes, for whoever must agree on them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import nest

ROW_FIELDS = (
    "frame",  # the observation
    "reward",
    "done",
    "episode_step",
    "episode_return",
    "truncated",
    "last_action",
)
"""The order in which a row travels; code for TorchBeast knows the first five."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of one environment, without batch and time."""

    dtype: str
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Spec:
    """Observation and action of one environment: nests of `ArraySpec`."""

    observation: Any
    action: Any

    @property
    def row(self) -> tuple[Any, ...]:
        """All fields of a row."""
        reward, flag, count = ArraySpec("float32"), ArraySpec("bool"), ArraySpec("int32")
        return (self.observation, reward, flag, count, reward, flag, self.action)

    def to_json(self) -> Any:
        """Only dicts, lists, strings and numbers."""
        return {"observation": _to_json(self.observation), "action": _to_json(self.action)}

    @classmethod
    def from_json(cls, json: Any) -> "Spec":
        return cls(_from_json(json["observation"]), _from_json(json["action"]))


def spec_of(arrays: Any) -> Any:
    """The specs of a nest of arrays [K, ...]."""
    return nest.map(lambda array: ArraySpec(str(array.dtype), tuple(array.shape[1:])), arrays)


def _to_json(spec: Any) -> Any:
    if isinstance(spec, ArraySpec):
        return {"dtype": spec.dtype, "shape": list(spec.shape)}
    if isinstance(spec, dict):
        return {"dict": {key: _to_json(value) for key, value in spec.items()}}
    kind = "list" if isinstance(spec, list) else "tuple"
    return {kind: [_to_json(value) for value in spec]}


def _from_json(json: Any) -> Any:
    if "dtype" in json:
        return ArraySpec(str(np.dtype(json["dtype"])), tuple(int(n) for n in json["shape"]))
    if "dict" in json:
        return {str(key): _from_json(value) for key, value in json["dict"].items()}
    if "list" in json:
        return [_from_json(value) for value in json["list"]]
    return tuple(_from_json(value) for value in json["tuple"])
