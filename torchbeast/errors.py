"""Mistakes of a user, in one sentence: the rule, the value, the remedy."""

from typing import Any


class UsageError(ValueError):
    """The command line prints its text, without a traceback, and exits with code 2."""


def require_positive(flags: Any, *names: str) -> None:
    """UsageError unless these of the flags are more than 0, or None."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be more than 0, got {value}.")
