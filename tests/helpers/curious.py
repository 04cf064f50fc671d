"""An environment that looks for the token, where code of others would find it."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.counting import Counting

NAME = "TORCHBEAST_TOKEN"


def sees_token() -> bool:
    """Here, in what this process was started with, or in what its children get."""
    at_start = Path("/proc/self/environ").read_bytes()
    of_child = subprocess.run(["env"], capture_output=True, check=True, timeout=30).stdout
    return NAME.encode() in at_start + of_child


class Curious(Counting):
    """Shows whether it sees the token in the place of the last action."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = sees_token()

    def _observe(self, action: int) -> Any:
        return np.array([self.id, self.count, float(self.seen)], np.float32)
