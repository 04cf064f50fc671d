"""Rows that environments might give, for the trial of a model before training."""

from typing import Any

import numpy as np

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ACTION_MASK, ArraySpec, split_mask
from libtorchbeast.tree import map_tree
from torchbeast.core.distributions import MAX_BOUND


def random_rows(spec: Spec, T: int, B: int) -> dict[str, Any]:
    """Rows [T, B, ...] within the bounds of `spec`, in which every action is possible."""
    generator = np.random.default_rng(0)
    rows = map_tree(lambda leaf: draw(leaf, (T, B), generator), spec.row)
    rows["truncated"][:] = False
    if split_mask(rows["frame"])[1] is not None:
        rows["frame"][ACTION_MASK] = map_tree(np.ones_like, rows["frame"][ACTION_MASK])
    return rows


def draw(leaf: ArraySpec, size: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Numbers [*size, ...] between the bounds; where there are none, near the other one or 0."""
    if leaf.dtype == "bool":
        return np.ones((*size, *leaf.shape), np.bool_)
    is_integer = np.issubdtype(leaf.dtype, np.integer)
    low, high = leaf.bounds
    if leaf.dtype == "uint8" and leaf.low is None and leaf.high is None:
        low, high = np.zeros_like(low), np.full_like(high, 255.0)
    if not leaf.categories:
        low = np.where(low < -MAX_BOUND, -np.inf, low)
        high = np.where(high > MAX_BOUND, np.inf, high)
    # An integer of unknown range may be an index: 0 is the one that is likely to be there.
    first = np.where(np.isfinite(low), low, np.minimum(0.0, high))
    last = np.where(np.isfinite(high), high, np.maximum(0.0 if is_integer else 1.0, first))
    unit = generator.uniform(0.0, 1.0, (*size, *leaf.shape))
    if is_integer:
        return np.minimum(np.floor(first + unit * (last - first + 1)), last).astype(leaf.dtype)
    return (first + unit * (last - first)).astype(leaf.dtype)
