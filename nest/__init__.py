"""Nested structures of tuples, lists, dicts and namedtuples, mapped over in C++.

Anything else is a leaf, None included. Dicts are walked in the order of their sorted keys.
"""

from nest._C import NestError, flatten, front, map, map_many, map_many2, pack_as

__all__ = ["NestError", "flatten", "front", "map", "map_many", "map_many2", "pack_as"]
