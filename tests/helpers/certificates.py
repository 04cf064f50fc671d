"""Certificates for tests, made with the commands of docs/remote.md."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """An authority, and certificates signed by it."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    @classmethod
    def make(cls, folder: Path, names: str = "DNS:learner,IP:127.0.0.1") -> "Certificates":
        """`names` are those by which the ends are called."""
        self = cls(folder)
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
                      "-nodes", "-days", "1", "-keyout", "ca.key", "-out", "ca.pem",
                      "-subj", "/CN=ours")  # fmt: skip
        for name in ("learner", "worker"):
            self.issue(name, names)
        return self

    def issue(self, name: str, names: str) -> None:
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr",
                      "-subj", f"/CN={name}")  # fmt: skip
        self.path("names").write_text(f"subjectAltName={names}")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                      "-CAcreateserial", "-days", "1", "-extfile", "names",
                      "-out", f"{name}.pem")  # fmt: skip

    def _openssl(self, *args: str) -> None:
        command = ["openssl", *args]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=60)
