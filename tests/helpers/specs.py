"""Specs of environments that do not exist."""

from libtorchbeast.rows import Spec
from libtorchbeast.specs import ArraySpec, discrete


def spec_for(shape, num_actions, dtype=None, low=None, high=None):
    """Of one array, bytes if it looks like an image, and that many actions."""
    if dtype is None:
        dtype = "uint8" if len(shape) >= 3 else "float32"
    return Spec(ArraySpec(dtype, shape, low, high), discrete(num_actions))
