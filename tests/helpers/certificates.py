"""Certificates and tokens for tests, made with the commands of docs/remote.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast.rpc.security import Security
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


def of_holder(certificates: Certificates, name: str, token: Security, **options: Any) -> Security:
    """What an end dials, or listens, with that has the certificate of this name."""
    return Security(
        tls_ca=certificates.path("ca.pem"),
        tls_cert=certificates.path(f"{name}.pem"),
        tls_key=certificates.path(f"{name}.key"),
        token_file=token.token_file,
        **options,
    )


def write_secret(path: Path, text: str) -> Path:
    """A file that only its owner can read."""
    keys.write_private(path, text.encode())
    return path
