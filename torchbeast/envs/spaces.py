"""Converts observations to the dtypes that models use, and specs to Gymnasium's spaces."""

from typing import Any

import numpy as np
from gymnasium import spaces

from libtorchbeast.specs import ArraySpec
from libtorchbeast.tree import map_tree

# Networks have no use for 64-bit floats, and PyTorch hardly supports wide unsigned integers.
_DTYPES = {
    np.dtype(np.float64): np.float32,
    np.dtype(np.uint16): np.int32,
    np.dtype(np.uint32): np.int64,
    np.dtype(np.uint64): np.float32,
}


def observe(observation: Any) -> Any:
    """An observation, of one environment or of a vector of them, as a tree of such arrays."""
    if type(observation) is np.ndarray:  # for speed: the usual case
        dtype = _DTYPES.get(observation.dtype)
        return observation if dtype is None else observation.astype(dtype)
    return map_tree(_convert, observation)


def _convert(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(_DTYPES.get(array.dtype, array.dtype), copy=False)


def space_of_spec(spec: Any) -> spaces.Space[Any]:
    """Gymnasium's space for a tree of specs, for models that are made from spaces."""
    if isinstance(spec, dict):
        return spaces.Dict({key: space_of_spec(part) for key, part in spec.items()})
    if not isinstance(spec, ArraySpec):
        return spaces.Tuple([space_of_spec(part) for part in spec])
    low, high = spec.bounds
    counts = spec.num_categories
    if counts and not spec.shape:
        return spaces.Discrete(counts[0], start=int(low))
    dtype: Any = np.dtype(spec.dtype).type
    if dtype is np.bool_ or (dtype is np.int8 and set(counts) == {2} and not low.any()):
        return spaces.MultiBinary(spec.shape[0] if len(spec.shape) == 1 else spec.shape)
    if counts:
        nvec = np.reshape(counts, spec.shape)
        return spaces.MultiDiscrete(nvec, dtype=dtype, start=low.astype(dtype))
    if np.issubdtype(dtype, np.integer):  # integers have no infinity
        low = np.maximum(low, np.iinfo(dtype).min)
        high = np.minimum(high, np.iinfo(dtype).max)
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
