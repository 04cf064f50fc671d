"""Nested structures in a dozen lines of Python, for MonoBeast, which needs nothing compiled.

A tree is a dict, a tuple or a list of trees; anything else is a leaf.
"""

from collections.abc import Callable
from typing import Any


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to each leaf of `tree` and the leaves at the same place in `others`."""
    if isinstance(tree, dict):
        return {k: map_tree(function, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        mapped = [map_tree(function, *parts) for parts in zip(tree, *others, strict=True)]
        return tree._make(mapped) if hasattr(tree, "_make") else type(tree)(mapped)
    return function(tree, *others)
