"""Observations with the dtypes that agents calculate with."""

from typing import Any

import numpy as np

from libtorchbeast.tree import map_tree

# Of floats, 64 bits are more than a network can use; PyTorch hardly knows wide unsigned integers.
_DTYPES = {
    np.dtype(np.float64): np.float32,
    np.dtype(np.uint16): np.int32,
    np.dtype(np.uint32): np.int64,
    np.dtype(np.uint64): np.float32,
}


def observe(observation: Any) -> Any:
    """A tree of arrays, of one environment or of a vector of them."""
    if type(observation) is np.ndarray:  # for speed: the usual case
        dtype = _DTYPES.get(observation.dtype)
        return observation if dtype is None else observation.astype(dtype)
    return map_tree(_convert, observation)


def _convert(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(_DTYPES.get(array.dtype, array.dtype), copy=False)
