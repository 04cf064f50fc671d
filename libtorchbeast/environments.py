"""Groups of environments: what they can do, and how a process that was told a name makes them."""

import importlib
from typing import Any, Protocol

Row = dict[str, Any]


class Environments(Protocol):
    """`num_envs` environments that step together; torchbeast/envs/row.py has the rules of rows.

    May have `num_actions`, and `action_spec`, a nest of `ArraySpec` (default: one int64).
    """

    num_envs: int

    def reset(self) -> Row: ...
    def step(self, actions: Any) -> Row: ...
    def close(self) -> None: ...


def make_environments(factory: str, num_envs: int, seed: int, **options: Any) -> Environments:
    """Call `package.module:function`."""
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)(num_envs=num_envs, seed=seed, **options)
