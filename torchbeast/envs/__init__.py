"""Environments by name: Gymnasium ids, Atari, toys, or a user's factory. Never imports torch."""

from libtorchbeast.rows import Environments, Row
from torchbeast.envs.names import REMOTE, check_env
from torchbeast.envs.options import EnvOptions
from torchbeast.envs.registry import (
    describe_lives,
    is_atari,
    look_at,
    look_at_game,
    make_envs,
    make_group,
)

__all__ = [
    "GROUP_FACTORY",
    "REMOTE",
    "EnvOptions",
    "Environments",
    "Row",
    "check_env",
    "describe_lives",
    "is_atari",
    "look_at",
    "look_at_game",
    "make_envs",
    "make_group",
]

GROUP_FACTORY = "torchbeast.envs:make_group"
"""The name under which processes that host environments import `make_group`."""
