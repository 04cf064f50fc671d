"""Mistakes of a user, in one sentence: the rule, the value, the remedy."""


class UsageError(ValueError):
    """The command line prints its text, without a traceback, and exits with code 2."""
