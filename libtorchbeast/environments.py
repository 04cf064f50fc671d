"""Groups of environments: what they can do, and how a process that was told a name makes them."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Row = dict[str, Any]


class Unstacked:
    """K arrays that stand for one [K, ...]: who copies them on anyway may spare one copy.

    For frames of `Environments` in processes that pass them on at once.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        kinds = {(array.dtype, array.shape) for array in arrays}
        if len(kinds) != 1:
            what = ", ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds))
            raise ValueError(f"Observations of a group must be alike, got {what}.")
        self.arrays = arrays
        self.dtype = arrays[0].dtype
        self.shape = (len(arrays), *arrays[0].shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.arrays).astype(dtype or self.dtype, copy=False)


class Environments(Protocol):
    """`num_envs` environments that step together; torchbeast/envs/row.py has the rules of rows.

    May have `num_actions`, and `action_spec`, a nest of `ArraySpec` (default: one int64). Frames
    are nests of arrays, or of `Unstacked` ones.
    """

    num_envs: int

    def reset(self) -> Row: ...
    def step(self, actions: Any) -> Row: ...
    def close(self) -> None: ...


def make_environments(factory: str, num_envs: int, seed: int, **options: Any) -> Environments:
    """Call `package.module:function`."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(num_envs=num_envs, seed=seed, **options)
