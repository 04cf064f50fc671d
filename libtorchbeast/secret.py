"""The token from the variable TORCHBEAST_TOKEN, kept where environments do not inherit it.

Environments, and the programs that they start, are other people's code. So our programs remove the
variable from os.environ before they make environments, and pass the token over a pipe to those
helper processes that need it. Pure Python.
"""

import os

VARIABLE = "TORCHBEAST_TOKEN"
_token = ""


def take() -> None:
    """Move the token from os.environ to this process's memory."""
    keep(os.environ.pop(VARIABLE, _token))


def keep(token: str) -> None:
    global _token
    _token = token


def token() -> str:
    """The token; empty if there is none."""
    return os.environ.get(VARIABLE, _token)


def pipe_with_token() -> int:
    """A descriptor from which the token can be read once."""
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as file:
        file.write(token().encode())
    return read_fd
