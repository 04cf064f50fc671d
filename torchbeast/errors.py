"""Errors caused by the user. Their message is one sentence: the rule, the value, the remedy."""

from typing import Any


class UsageError(ValueError):
    """A user's mistake: command lines print the message without traceback and exit with code 2."""


def require_positive(flags: Any, *names: str) -> None:
    """Raise UsageError unless each of the named flags is None or greater than 0."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be more than 0, got {value}.")
