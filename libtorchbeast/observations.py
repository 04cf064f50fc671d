"""Observations as trees of arrays, and the checks that every host of environments makes of them.

Nothing here is compiled, and nothing needs more than NumPy.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from libtorchbeast.rows import Row
from libtorchbeast.specs import UnknownSpace, describe
from libtorchbeast.tree import leaves_of, map_tree

FEW = 64  # numbers, which Python adds up sooner than NumPy has started


def as_arrays(observation: Any) -> Any:
    """An observation as a tree of arrays, with the dtypes that the environment gave."""
    if type(observation) is np.ndarray:
        return observation
    return map_tree(np.asarray, observation)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What an array of an observation must be."""

    dtype: np.dtype
    shape: tuple[int, ...]
    is_float: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class FrameCheck:
    """Checks that observations are as the first one was, and all their numbers finite."""

    def __init__(self) -> None:
        self._expected: Any = None
        self._fast = _Leaf(np.dtype(object), (), is_float=False)  # if it is one array

    def __call__(self, frame: Any) -> None:
        """ValueError with the array's name if one is wrong."""
        fast = self._fast
        if (
            type(frame) is ndarray
            and frame.dtype is fast.dtype
            and frame.shape == fast.shape
            and (not fast.is_float or all_finite(frame))
        ):
            return
        if self._expected is None:
            self._expect_as(frame)
        if not _is_good(frame, self._expected):
            raise ValueError(self._complaint(frame))

    def _expect_as(self, frame: Any) -> None:
        for name, array in leaves_of(frame):
            if array.dtype.kind not in "biuf":
                raise UnknownSpace(
                    f"{named(name)} must hold numbers, got the dtype {array.dtype}; leave it out "
                    "with a wrapper (--wrappers)."
                )
        self._expected = map_tree(_leaf_of, frame)
        if isinstance(self._expected, _Leaf):
            self._fast = self._expected

    def _complaint(self, frame: Any) -> str:
        expected = dict(leaves_of(self._expected))
        for name, array in leaves_of(frame):
            if name not in expected:
                return f"{named(name)} was not in the first one."
            must, got = expected.pop(name), _leaf_of(array)
            if must != got:
                return f"{named(name)} must be {must}, got {got}."
            if must.is_float and not all_finite(array):
                return f"{named(name)} must be finite, got nan or inf in it."
        if expected:
            return f"{named(next(iter(expected)))} is missing."
        return "The observation must be nested as the first one was, got another structure."


def fit(observation: Any, spec: Any) -> Any:
    """An observation as arrays of the dtypes that a space declares; ValueError if it is none."""
    try:
        if isinstance(spec, dict) and observation.keys() != spec.keys():
            raise KeyError(*(observation.keys() ^ spec.keys()))
        arrays = map_tree(lambda leaf, part: np.asarray(part), spec, observation)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"The observation must be nested like its space, {describe(spec)}, got another "
            f"structure ({error!r})."
        ) from error
    pairs = zip(leaves_of(spec), leaves_of(arrays), strict=True)
    for (name, leaf), (_, array) in pairs:
        is_number = array.dtype.kind in "biuf"
        is_exact = "float" in leaf.dtype or (
            is_number and np.array_equal(array, array.astype(leaf.dtype))
        )
        if not is_number or array.shape != leaf.shape or not is_exact:
            got = f"{array.dtype}{list(array.shape)}"
            raise ValueError(f"{named(name)} must be {leaf} as its space says, got {got}.")
    return map_tree(lambda leaf, array: array.astype(leaf.dtype, copy=False), spec, arrays)


def check_finite(row: Row) -> None:
    """ValueError unless all floats of a group's row are finite; says whose are not."""
    for name, array in leaves_of(row["frame"]):
        _check_finite(named(name), array)
    _check_finite("The reward", row["reward"])


def all_finite(array: np.ndarray) -> bool:
    """Whether an array of floats has neither infinities nor not-a-numbers."""
    # A sum is not finite if one of its numbers is not, and takes a fraction of the time. It may
    # also overflow, hence the exact test after it.
    if array.size <= FEW and math.isfinite(sum(array.ravel().tolist())):
        return True
    return bool(np.isfinite(array).all())


def stack(arrays: list[np.ndarray]) -> np.ndarray:
    """`np.stack` in three quarters of its time, for arrays that were checked to be alike."""
    if arrays[0].ndim == 0:
        return np.array(arrays)
    return np.concatenate(arrays).reshape(len(arrays), *arrays[0].shape)


def named(name: str) -> str:
    """An array of an observation, for people."""
    return f"The observation's `{name}`" if name else "The observation"


def _leaf_of(array: np.ndarray) -> _Leaf:
    return _Leaf(array.dtype, array.shape, array.dtype.kind == "f")


def _is_good(frame: Any, expected: Any) -> bool:
    """Written for speed, since every observation of every environment comes by."""
    if type(expected) is _Leaf:
        return (
            isinstance(frame, np.ndarray)
            and frame.dtype == expected.dtype
            and frame.shape == expected.shape
            and (not expected.is_float or all_finite(frame))
        )
    if isinstance(expected, dict):
        if not isinstance(frame, dict) or frame.keys() != expected.keys():
            return False
        frame, expected = [frame[key] for key in expected], expected.values()
    elif not isinstance(frame, (tuple, list)) or len(frame) != len(expected):
        return False
    for part, expected_part in zip(frame, expected, strict=True):
        if not _is_good(part, expected_part):
            return False
    return True


def _check_finite(what: str, array: Any) -> None:
    """`array` is [num_envs, ...], or `Unstacked`."""
    if array.dtype.kind != "f":
        return
    array = np.asarray(array)
    if not all_finite(array):
        is_bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        bad = ", ".join(str(i) for i in np.flatnonzero(is_bad))
        raise ValueError(f"{what} must be finite, got nan or inf from environment {bad}.")
