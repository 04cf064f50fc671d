"""Environments by name: Gymnasium ids, Atari, toys, or a user's factory. Never imports torch."""

from libtorchbeast.rows import Row
from torchbeast.envs.registry import REMOTE, EnvOptions, check_env, make_envs, make_group
from torchbeast.envs.spaces import Environments

__all__ = [
    "GROUP_FACTORY",
    "REMOTE",
    "EnvOptions",
    "Environments",
    "Row",
    "check_env",
    "make_envs",
    "make_group",
]

GROUP_FACTORY = "torchbeast.envs:make_group"
"""How processes that host environments are given `make_group`."""
