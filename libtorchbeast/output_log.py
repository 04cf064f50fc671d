"""Keeps what environments print in a file of the run, as it would flood the learner's terminal."""

import logging
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger("torchbeast")

FILE_NAME = "envs.log"
MAX_BYTES = 8 << 20  # of the file; then it is renamed to `older_path`, which it replaces


class OutputLog:
    """A file of bounded size with the newest lines, each after the name of its process.

    A full disk does not end a run: lines that cannot be written are lost.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """The file is made when the first line comes."""
        self.path = path
        self._max_bytes = max_bytes
        self._has_said_where = self._has_said_full = False

    @property
    def older_path(self) -> Path:
        """The file with the lines that are older than those in `path`."""
        return self.path.with_name(f"{self.path.name}.1")

    def keep(self, name: str, lines: list[str]) -> None:
        """Add lines that `name` printed."""
        if not self._has_said_where:
            self._has_said_where = True
            logger.info("%s prints something: what environments print is in %s.", name, self.path)
        with suppress(OSError):
            if self.path.exists() and self.path.stat().st_size > self._max_bytes:
                self._set_aside()  # before the newest lines, which are always in `path`
            with self.path.open("a", errors="replace") as file:
                file.writelines(f"{name}: {line}\n" for line in lines)

    def _set_aside(self) -> None:
        self.path.replace(self.older_path)
        if not self._has_said_full:
            self._has_said_full = True
            logger.warning(
                "Environments print a lot; only the newest %d to %d MiB are kept, in %s and %s.",
                self._max_bytes >> 20, 2 * self._max_bytes >> 20, self.path, self.older_path.name,
            )  # fmt: skip
