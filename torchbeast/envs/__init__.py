"""Environments by name: Gymnasium ids, Atari, toys, or a user's factory. Never imports torch."""

from torchbeast.envs.registry import REMOTE, EnvOptions, check_env, make_envs
from torchbeast.envs.row import Environments, Row

__all__ = ["REMOTE", "EnvOptions", "Environments", "Row", "check_env", "make_envs"]
