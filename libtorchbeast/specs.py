"""Specs: what one environment's observation and action are, as trees of `ArraySpec`.

They hold all that a Gymnasium space holds, without Gymnasium. Lanes, the handshake, models and
recipes are derived from them. Pure Python; needs only NumPy.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from libtorchbeast.tree import leaves_of, map_tree

Bound = float | tuple[float, ...] | None

MAX_CATEGORIES = 1 << 16  # of one element of an action; also the most elements with categories
MAX_OBSERVED_CATEGORIES = 1 << 31  # of one element of an observation
# For arrays with more bounds, only the smallest and the largest one are kept.
MAX_BOUNDS, MAX_CATEGORY_BOUNDS = 128, 4096


ACTION_MASK = "action_mask"
"""The key of the mask in a dict observation: 1 for each possible action, 0 for the others."""


class UnknownSpace(ValueError):
    """A space whose elements are not arrays of one shape."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of one environment, without batch and time.

    `low` and `high` bound its numbers: one for all, or one for each element in C order (infinite
    for those without); None if no element has a bound, or none is known.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    low: Bound = None
    high: Bound = None
    categories: bool = False
    """Whether its integers, from `low` to `high`, are categories, which have no order."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """`low` and `high` as float64 arrays of this shape, infinite where there is none."""
        return self._as_array(self.low, -math.inf), self._as_array(self.high, math.inf)

    def _as_array(self, bound: Bound, default: float) -> np.ndarray:
        array = np.asarray(default if bound is None else bound, np.float64)
        if array.ndim:
            return array.reshape(self.shape)
        return np.broadcast_to(array, self.shape)

    @property
    def num_categories(self) -> tuple[int, ...]:
        """The number of categories of each element; () if there are none, or not known."""
        if not self.categories:
            return ()
        low, high = self.bounds
        if not (np.isfinite(low) & np.isfinite(high)).all():
            return ()
        return tuple(int(n) for n in (high - low + 1).ravel())

    @property
    def is_bits(self) -> bool:
        """Whether it is a MultiBinary: each element is 0 or 1, on its own."""
        return self.dtype == "int8" and bool(self.shape) and set(self.num_categories) == {2}

    @property
    def num_choices(self) -> int:
        """The number of values in the mask of such an action: one for each category, or bit."""
        return len(self.num_categories) if self.is_bits else sum(self.num_categories)


INT64 = ArraySpec("int64")


def discrete(n: int) -> ArraySpec:
    """The spec of a single category from 0 to n - 1."""
    return ArraySpec("int64", (), 0, n - 1, categories=True)


def count_actions(spec: Any) -> int:
    """The n of an action that is `discrete(n)`; 0 if it is something else, or n is unknown."""
    is_number = isinstance(spec, ArraySpec) and not spec.shape and spec.num_categories
    return spec.num_categories[0] if is_number else 0


# ----------------------------------------------------------------------------- arrays and spaces


def spec_of(arrays: Any) -> Any:
    """The specs of a tree of arrays [K, ...]."""
    return map_tree(lambda array: ArraySpec(str(array.dtype), tuple(array.shape[1:])), arrays)


def spec_of_space(space: Any) -> Any:
    """Convert a space of Gym or Gymnasium to a tree of specs; `UnknownSpace` if that is impossible.

    It looks only at the attributes of the space, so that any version of these packages will do.
    """
    kinds = {kind.__name__ for kind in type(space).__mro__}
    if is_bare_discrete(space):
        return discrete(int(space.n))
    has_arrays = hasattr(space, "spaces") or getattr(space, "shape", None) is not None
    if kinds & {"Text", "Graph", "OneOf"} or not has_arrays:
        raise UnknownSpace(
            f"A {type(space).__name__} space has no arrays of one shape; wrap the environment so "
            "that it has Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them."
        )
    parts = getattr(space, "spaces", None)
    if isinstance(parts, (list, tuple)):
        return tuple(spec_of_space(part) for part in parts)
    if parts is not None:
        return {key: spec_of_space(part) for key, part in parts.items()}
    first = getattr(space, "start", 0)
    if "Discrete" in kinds:
        return ArraySpec("int64", (), int(first), int(first) + int(space.n) - 1, categories=True)
    shape = tuple(int(n) for n in space.shape)
    dtype = str(np.dtype(space.dtype))
    if "MultiDiscrete" in kinds:
        last = np.asarray(first) + np.asarray(space.nvec) - 1
        return ArraySpec(dtype, shape, _exact(first), _exact(last), categories=True)
    if "MultiBinary" in kinds:
        return ArraySpec(dtype, shape, 0, 1, categories=True)
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    return ArraySpec(dtype, shape, _bound(low), _bound(high))


def spec_or(default: Any, space: Any) -> Any:
    """The spec of a space, or `default` if it is none, as in environments that are not Gym's."""
    is_space = hasattr(space, "sample") or is_bare_discrete(space)
    return spec_of_space(space) if is_space else default


def is_bare_discrete(space: Any) -> bool:
    """Whether `space` is a package's own replacement for Discrete, with an `n` and little else."""
    n = getattr(space, "n", None)
    is_number = isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    return is_number and not any(hasattr(space, name) for name in ("sample", "shape", "spaces"))


def observation_spec_of(space: Any) -> Any:
    """The spec of a space of observations; None if it is not a space, or not one of arrays.

    Only its bounds and categories are used, as dtypes and shapes are those of the first
    observation. If there are too many bounds or categories, they are dropped.
    """
    try:
        spec = spec_or(None, space)
    except UnknownSpace:
        return None
    return None if spec is None else map_tree(_within_limits, spec)


def _within_limits(leaf: ArraySpec) -> ArraySpec:
    size = MAX_CATEGORY_BOUNDS if leaf.categories else MAX_BOUNDS
    is_small = all(np.size(bound) <= size for bound in (leaf.low, leaf.high) if bound is not None)
    low = leaf.low if is_small else _bound(leaf.bounds[0].min())
    high = leaf.high if is_small else _bound(leaf.bounds[1].max())
    most = max(leaf.num_categories, default=0)
    has_few = math.prod(leaf.shape) <= MAX_CATEGORIES and most <= MAX_OBSERVED_CATEGORIES
    return replace(leaf, low=low, high=high, categories=leaf.categories and is_small and has_few)


def with_bounds(spec: Any, declared: Any) -> Any:
    """`spec`, that of actual arrays, with the bounds that a space declares for equal shapes."""

    def merge(leaf: ArraySpec, said: Any) -> ArraySpec:
        if not isinstance(said, ArraySpec) or said.shape != leaf.shape:
            return leaf
        categories = said.categories and leaf.dtype != "bool" and "int" in leaf.dtype
        return replace(leaf, low=said.low, high=said.high, categories=categories)

    try:
        return map_tree(merge, spec, declared)
    except (KeyError, IndexError, TypeError, ValueError):
        return spec  # a space of another structure says nothing about these arrays


def agents_action(spec: Any) -> Any:
    """Convert the spec of an environment's action to the agent's: categories from 0, float32."""

    def convert(leaf: ArraySpec) -> ArraySpec:
        if leaf.num_categories:
            last = np.reshape(leaf.num_categories, leaf.shape) - 1
            return replace(leaf, low=0, high=_exact(last))
        is_float = np.issubdtype(leaf.dtype, np.floating)
        return replace(leaf, dtype="float32") if is_float else leaf

    return map_tree(convert, spec)


def has_offsets(spec: Any) -> bool:
    """Whether some categories do not begin at 0."""
    return any(leaf.num_categories and np.any(leaf.bounds[0]) for _, leaf in leaves_of(spec))


def takes_as_given(spec: Any) -> bool:
    """Whether environments take agents' actions as they are, without `environments_action`."""
    has_floats = any(np.issubdtype(leaf.dtype, np.floating) for _, leaf in leaves_of(spec))
    return not has_floats and not has_offsets(spec)


def environments_action(spec: Any, actions: Any) -> Any:
    """Convert agents' actions [K, ...] to those that environments with this spec take.

    Floats are clipped to the bounds, because an agent may draw values outside.
    """

    def convert(leaf: ArraySpec, action: Any) -> Any:
        action = np.asarray(action)
        low, high = leaf.bounds
        if leaf.num_categories:
            return action + low.astype(leaf.dtype)
        if np.issubdtype(leaf.dtype, np.floating):
            return np.clip(action, low, high).astype(leaf.dtype)
        return action

    return map_tree(convert, spec, actions)


def _exact(values: Any) -> Bound:
    """One number if all values are equal, else a flat tuple of them."""
    numbers = np.asarray(values).ravel()
    is_one = (numbers == numbers[0]).all()
    return numbers[0].item() if is_one else tuple(numbers.tolist())


def _bound(values: Any) -> Bound:
    if values is None or np.size(values) == 0:
        return None
    bound = _exact(values)
    return None if isinstance(bound, float) and not math.isfinite(bound) else bound


# --------------------------------------------------------------------------------- trees of specs


def split_mask(observation: Any) -> tuple[Any, Any]:
    """Split an observation, or its spec, into the rest and the action mask (None without one).

    If the dict has only one other part, the rest is that part.
    """
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return observation, None
    rest = {key: part for key, part in observation.items() if key != ACTION_MASK}
    return next(iter(rest.values())) if len(rest) == 1 else rest, observation[ACTION_MASK]


def describe(spec: Any) -> str:
    """A tree of specs as text, for logs and error messages."""
    if isinstance(spec, ArraySpec):
        return str(spec)
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{key!r}: {describe(spec[key])}" for key in sorted(spec)) + "}"
    return "(" + ", ".join(describe(item) for item in spec) + ")"


def canonical(spec: Any) -> Any:
    """A form for comparison: equal for trees whose arrays have equal dtypes, shapes and places.

    Sequences become tuples, keys are sorted, and each array keeps only dtype and shape.
    """
    if isinstance(spec, ArraySpec):
        return ArraySpec(spec.dtype, spec.shape)
    if isinstance(spec, dict):
        return {key: canonical(spec[key]) for key in sorted(spec)}
    return tuple(canonical(item) for item in spec)


def to_json(spec: Any) -> Any:
    """A tree of specs as dicts, lists, strings and numbers."""
    if isinstance(spec, ArraySpec):
        json = {"dtype": spec.dtype, "shape": list(spec.shape)}
        said = {"low": spec.low, "high": spec.high, "categories": spec.categories or None}
        return json | {name: value for name, value in said.items() if value is not None}
    if isinstance(spec, dict):
        return {"dict": {key: to_json(value) for key, value in spec.items()}}
    kind = "list" if isinstance(spec, list) else "tuple"
    return {kind: [to_json(value) for value in spec]}


def from_json(json: Any) -> Any:
    if "dtype" in json:
        return ArraySpec(
            str(json["dtype"]),
            tuple(int(n) for n in json["shape"]),
            _bound_from_json(json.get("low")),
            _bound_from_json(json.get("high")),
            bool(json.get("categories", False)),
        )
    if "dict" in json:
        return {str(key): from_json(value) for key, value in json["dict"].items()}
    if "list" in json:
        return [from_json(value) for value in json["list"]]
    return tuple(from_json(value) for value in json["tuple"])


def _bound_from_json(value: Any) -> Bound:
    if isinstance(value, list):
        return tuple(number + 0 for number in value)  # TypeError if one is not a number
    return None if value is None else value + 0
