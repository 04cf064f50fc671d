"""Certificates and tokens in use: files may be replaced, and names revoked, at any time."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libtorchbeast.rpc.handshake import Refused, check_token
from libtorchbeast.text import printable

if TYPE_CHECKING:  # only then: the import needs grpc
    from libtorchbeast.rpc.grpc_streams import Watched

logger = logging.getLogger("torchbeast")

WORKER_URI = "torchbeast:worker:"
"""How the URI in a worker's certificate begins; torchbeast/keys.py appends the worker's name."""

Stamp = tuple[tuple[int, int, int], ...]


def stamp_of(paths: Sequence[Path]) -> Stamp:
    """Return a value that changes if one of the files does; raise OSError if one is missing."""
    stats = [os.stat(path.expanduser()) for path in paths]
    return tuple((stat.st_ino, stat.st_ctime_ns, stat.st_size) for stat in stats)


class ReloadedFiles:
    """A value read from files, and again when they change; if that fails, the old one stays."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], Any]) -> None:
        """`read` raises ValueError or OSError if the files cannot be used."""
        self._paths = paths
        self._read = read
        self._stamp = stamp_of(paths)
        self.value = read()

    def update(self) -> bool:
        """Read the files again if they have changed; return whether `value` is new."""
        try:
            stamp = stamp_of(self._paths)
            if stamp == self._stamp:
                return False
            self.value, self._stamp = self._read(), stamp
        except (OSError, ValueError) as error:
            logger.warning(
                "A changed file cannot be read, so its old contents stay in use: %s", error
            )
            return False
        return True


def server_credentials(paths: Sequence[Path], read: Callable[[], Any], client_certs: bool) -> Any:
    """Return grpc's credentials for an end that listens.

    The files at `paths` may be replaced; the next handshake then uses the new ones. `read` returns
    their contents: (key, certificate, authority of clients or None).
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
    """Decides who may dial: a caller needs the token, and a certificate that is not revoked."""

    def __init__(self, security: Any, is_learner_expected: bool) -> None:
        """`security` is that of the end that listens.

        With `is_learner_expected`, a worker's certificate is refused.
        """
        self._security = security
        self._revoked = RevokedNames(security.revoked)
        self._token = ""
        self._stamp: Stamp = ()
        self._is_learner_expected = is_learner_expected

    def __call__(self, token: str, identity: Mapping[str, Sequence[bytes]]) -> str:
        """Return the name in the caller's certificate, if any; raise `Refused` if it may not dial.

        `identity` is grpc's `auth_context()`.
        """
        try:
            expected = self._read_token()
        except (OSError, ValueError) as error:
            logger.warning("All clients are refused until the token can be read: %s", error)
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
        """Whether there is a token, which every caller that passed the check has shown."""
        return bool(self._token or self._security.token_file or self._security.read_token())

    def _read_token(self) -> str:
        """Return the current token; its file is read again when it changes."""
        path = self._security.token_file
        if path is None:
            return self._security.read_token()
        stamp = stamp_of([path])
        if stamp != self._stamp:
            self._token, self._stamp = self._security.read_token(), stamp
        return self._token

    def end_revoked(self, streams: Iterable["Watched"]) -> None:
        """End the streams whose certificate has been revoked since they were opened."""
        for stream in list(streams):  # a copy: a stream that ends leaves the set
            try:
                self._check_name(stream.certified_name)
            except Refused as error:
                stream.end(error)

    def _check_name(self, name: str) -> None:
        if name:
            self._revoked.check(name)


class RevokedNames:
    """The names of revoked certificates, from a file that may change at any time."""

    def __init__(self, path: Path | None) -> None:
        self._file = ReloadedFiles([path], lambda: _names_in(path)) if path is not None else None

    def check(self, name: str) -> None:
        """Raise `Refused` if the name is revoked."""
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
    """Return the name (CN) in a peer's certificate, or "" if it has none.

    `identity` is grpc's `auth_context()`.
    """
    names = identity.get("x509_common_name") or [b""]
    return bytes(names[0]).decode(errors="replace")


def check_no_worker(identity: Mapping[str, Sequence[bytes]]) -> None:
    """Raise `Refused` if a caller shows a worker's certificate where a learner is expected."""
    for uri in identity.get("peer_uri") or ():
        if bytes(uri).startswith(WORKER_URI.encode()):
            raise Refused(
                "UNAUTHENTICATED",
                f"{printable(name_of(identity))} is a worker's certificate, and only a learner may "
                "dial here.",
            )
