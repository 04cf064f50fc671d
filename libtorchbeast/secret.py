"""The token of the variable TORCHBEAST_TOKEN, kept where environments do not inherit it.

Environments are other people's code, and so are the programs that they start. Our own programs
take the token out of the environment before they make any, and hand it to those helper processes
that need it over a pipe. Nothing here is compiled.
"""

import os

VARIABLE = "TORCHBEAST_TOKEN"
_token = ""


def take() -> None:
    """Move the token from the environment to this process's memory."""
    keep(os.environ.pop(VARIABLE, _token))


def keep(token: str) -> None:
    global _token
    _token = token


def token() -> str:
    """Empty if there is none."""
    return os.environ.get(VARIABLE, _token)


def pipe_with_token() -> int:
    """A descriptor from which the token can be read once."""
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as file:
        file.write(token().encode())
    return read_fd
