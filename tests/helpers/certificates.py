"""Certificates and tokens for tests, made with the commands of docs/remote.md."""

from dataclasses import dataclass
from pathlib import Path

from torchbeast import keys


@dataclass(frozen=True)
class Certificates:
    """An authority, and certificates signed by it."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    @classmethod
    def make(cls, folder: Path, *names: str) -> "Certificates":
        """`names` are those by which the learner is called."""
        self = cls(folder)
        self.command("authority")
        self.command("learner", *(names or ("learner", "127.0.0.1")))
        self.command("worker", "worker")
        return self

    def command(self, *args: str) -> None:
        assert keys.main([*args, "--folder", str(self.folder)]) == 0


def write_secret(path: Path, text: str) -> Path:
    """A file that only its owner can read."""
    keys.write_private(path, text.encode())
    return path
