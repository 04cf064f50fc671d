"""Nested structures in pure Python, for code that must work without compiled modules.

A tree is a dict, a tuple or a list of trees; anything else is a leaf. `nest` does the same, faster.
"""

from collections.abc import Callable, Iterator
from typing import Any


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to each leaf of `tree` and the leaves at the same place in `others`."""
    if isinstance(tree, dict):
        return {k: map_tree(function, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        mapped = [map_tree(function, *parts) for parts in zip(tree, *others, strict=True)]
        return tree._make(mapped) if hasattr(tree, "_make") else type(tree)(mapped)
    return function(tree, *others)


def leaves_of(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves with their names, such as `camera/left`; dicts in the order of sorted keys."""
    if isinstance(tree, dict):
        parts: Any = ((key, tree[key]) for key in sorted(tree))
    elif isinstance(tree, (tuple, list)):
        parts = enumerate(tree)
    else:
        yield name, tree
        return
    for key, part in parts:
        yield from leaves_of(part, f"{name}/{key}" if name else str(key))
