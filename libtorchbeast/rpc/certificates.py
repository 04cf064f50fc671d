"""Certificates while they are in use: files that are replaced, and names that are revoked."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libtorchbeast.rpc.handshake import Refused, check_token
from libtorchbeast.text import printable

if TYPE_CHECKING:  # which needs grpc
    from libtorchbeast.rpc.grpc_streams import Watched

logger = logging.getLogger("torchbeast")

WORKER_URI = "torchbeast:worker:"
"""What a worker's certificate says that it is; torchbeast/keys.py puts the name behind it."""

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Another one whenever one of these files is another; OSError."""
    stats = [os.stat(path.expanduser()) for path in paths]
    return tuple((stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in stats)


class ReloadedFiles:
    """What some files say, read anew when they change; while they cannot be read, as it was."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Any]) -> None:
        """`read` raises ValueError or OSError if the files cannot be used."""
        self._paths = paths
        self._read = read
        self._stamp = stamp_of(paths)
        self.value = read()

    def update(self) -> bool:
        """Whether `value` is another one."""
        try:
            stamp = stamp_of(self._paths)
            if stamp == self._stamp:
                return False
            self.value, self._stamp = self._read(), stamp
        except (OSError, ValueError) as error:
            logger.warning("What was read before stays in use: %s", error)
            return False
        return True


def server_credentials(paths: Sequence[Path], read: Callable[[], Any], client_certs: bool) -> Any:
    """Of grpc: certificates that may be replaced; the next handshake uses the new ones.

    `read` gives (key, certificate, authority of clients or None).
    """
    import grpc

    def configuration() -> Any:
        key, certificate, authority = files.value
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    files = ReloadedFiles(paths, read)
    return grpc.dynamic_ssl_server_credentials(
        configuration(), lambda: configuration() if files.update() else None, client_certs
    )


class CallerCheck:
    """Who may dial this end: whoever has the token, and a certificate that is not revoked."""

    def __init__(self, security: Any, is_learner_expected: bool) -> None:
        """`security` is that of the end that listens."""
        self._security = security
        self._revoked = RevokedNames(security.revoked)
        self._token = ""
        self._stamp: Stamp = ()
        self._is_learner_expected = is_learner_expected

    def __call__(self, token: str, identity: Mapping[str, Sequence[bytes]]) -> str:
        """The name in the caller's certificate, which may be empty; `Refused`."""
        try:
            expected = self._read_token()
        except (OSError, ValueError) as error:
            logger.warning("Nobody can dial in: %s", error)
            raise Refused("UNAVAILABLE", "This end cannot read its token now; wait.") from error
        check_token(expected, token)
        name = name_of(identity)
        if self._security.revoked is not None and identity.get("x509_pem_cert") and not name:
            text = "A certificate must have a name (CN) here, by which it can be revoked; got none."
            raise Refused("UNAUTHENTICATED", text)
        self._check_name(name)
        if self._is_learner_expected:
            check_no_worker(identity)
        return name

    @property
    def knows_token(self) -> bool:
        """Whether who got past this check has shown one."""
        return bool(self._token or self._security.token_file or self._security.read_token())

    def _read_token(self) -> str:
        """As it is now; its file is read again when it changes."""
        path = self._security.token_file
        if path is None:
            return self._security.read_token()
        stamp = stamp_of([path])
        if stamp != self._stamp:
            self._token, self._stamp = self._security.read_token(), stamp
        return self._token

    def end_revoked(self, streams: Iterable["Watched"]) -> None:
        """End those whose certificate is revoked by now."""
        for stream in list(streams):  # one that is ended may leave the set
            try:
                self._check_name(stream.certified_name)
            except Refused as error:
                stream.end(error)

    def _check_name(self, name: str) -> None:
        if name:
            self._revoked.check(name)


class RevokedNames:
    """Names in certificates that are refused; the file may change at any time."""

    def __init__(self, path: Path | None) -> None:
        self._file = ReloadedFiles([path], lambda: _names_in(path)) if path is not None else None

    def check(self, name: str) -> None:
        """`Refused` if it is one of them."""
        if self._file is not None:
            self._file.update()
            if name in self._file.value:
                raise Refused(
                    "UNAUTHENTICATED", f"The certificate of {printable(name)} is revoked."
                )


def _names_in(path: Path) -> frozenset[str]:
    lines = path.expanduser().read_text().splitlines()
    return frozenset(name for line in lines if (name := line.partition("#")[0].strip()))


def name_of(identity: Mapping[str, Sequence[bytes]]) -> str:
    """The name in a peer's certificate, as grpc's `auth_context()` has it; empty without one."""
    names = identity.get("x509_common_name") or [b""]
    return bytes(names[0]).decode(errors="replace")


def check_no_worker(identity: Mapping[str, Sequence[bytes]]) -> None:
    """`Refused` if who dials shows a worker's certificate where a learner is expected."""
    for uri in identity.get("peer_uri") or ():
        if bytes(uri).startswith(WORKER_URI.encode()):
            raise Refused(
                "UNAUTHENTICATED",
                f"{printable(name_of(identity))} is a worker's certificate, and only a learner may "
                "dial here.",
            )
