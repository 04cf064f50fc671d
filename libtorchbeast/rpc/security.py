"""The security of connections: TLS and tokens.

Loopback addresses and unix sockets need neither. Any other address needs TLS and a token, unless
`insecure` says that the network is trusted; without TLS a token never leaves the machine. grpc is
not imported before a channel or a port is requested.
"""

import os
import shlex
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast import secret
from libtorchbeast.rpc.address import Address, owner_only_socket
from libtorchbeast.rpc.certificates import server_credentials
from libtorchbeast.rpc.limits import Limits, channel_options

MAX_TOKEN = 4096  # characters
_PATHS = ("tls_ca", "tls_cert", "tls_key", "revoked", "token_file")


@dataclass(frozen=True)
class Security:
    """The TLS files and the token of one end; the flags of learner and environments."""

    tls_ca: Path | None = None
    """Certificate of the authority that signed the other end's certificate (PEM)."""
    tls_cert: Path | None = None
    """This end's certificate (PEM); the end that listens needs one."""
    tls_key: Path | None = None
    """The private key of --tls_cert (PEM)."""
    tls_server_name: str | None = None
    """Dialing: the name in the listening end's certificate, if it differs from the address."""
    tls_client_certs: bool = False
    """Listening: also require a certificate, signed by --tls_ca, from clients that dial."""
    revoked: Path | None = None
    """Listening: file with names of certificates to refuse, one per line; may change any time."""
    token_file: Path | None = None
    """File with the secret that both ends know (or set the variable TORCHBEAST_TOKEN)."""
    insecure: bool = False
    """Allow other machines without TLS or token; only for a network that you trust."""

    def __post_init__(self) -> None:
        """Convert paths that were given as strings."""
        for name in _PATHS:
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, Path(path))

    @classmethod
    def of(cls, flags: Any) -> "Security":
        """Take the fields of this class from `flags`, which has them among others."""
        return cls(**{name: getattr(flags, name) for name in cls.__dataclass_fields__})

    def read_token(self) -> str:
        """Return the current secret; raise ValueError with one sentence if it cannot be used."""
        if self.token_file is None:
            token = secret.token().strip()  # a Kubernetes secret may end with a newline
        else:
            data = read_private_file(self.token_file, "token_file")
            token = data.decode(errors="replace").strip()
            if not token:
                raise ValueError(f"token_file must hold a secret, {self.token_file} is empty.")
        if len(token) > MAX_TOKEN or not (token.isascii() and token.isprintable()):
            raise ValueError(
                f"A token is one line of at most {MAX_TOKEN} ASCII characters, got something else."
            )
        return token

    def check_listening(self, address: str) -> None:
        """Raise ValueError with one sentence if listening there would be unsafe or cannot work."""
        if self.tls_client_certs and (self.tls_ca is None or self.tls_cert is None):
            raise ValueError("tls_client_certs needs tls_ca, tls_cert and tls_key; give all three.")
        if self.revoked is not None and not self.tls_client_certs:
            raise ValueError(
                "revoked needs tls_client_certs, as it lists names in the certificates of those "
                "who dial; give both."
            )
        self._check(address, self.tls_cert, "tls_cert and tls_key", "Listening for other machines")

    def check_dialing(self, address: str) -> None:
        """Raise ValueError with one sentence if dialing there would be unsafe or cannot work."""
        self._check(address, self.tls_ca, "tls_ca", "Dialing another machine")

    def _check(self, address: str, certificate: Path | None, flags: str, what: str) -> None:
        """Check what both ends need; `certificate` turns TLS on, and is set by `flags`."""
        is_local = Address.parse(address).is_local
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together, got only one; give both.")
        for name in ("tls_ca", "tls_cert", "tls_key", "revoked"):
            path = getattr(self, name)
            if path is not None:
                read_file(path, name)
        self._check_certificates()
        token = self.read_token()
        if is_local:
            return
        if certificate is None and not self.insecure:
            raise ValueError(
                f"{what} needs TLS, and {address} has none; give {flags}, or insecure for a "
                "network that you trust."
            )
        if certificate is None and token:
            raise ValueError(
                f"A token is sent to other machines over TLS only, and {address} has none; give "
                f"{flags}, or no token."
            )
        if not token and not self.insecure:
            raise ValueError(
                f"A connection to another machine needs a token, got none for {address}; set "
                "TORCHBEAST_TOKEN, give --token_file, or --insecure on a network that you trust."
            )

    def _check_certificates(self) -> None:
        """Raise ValueError unless the certificates and the key can be loaded and match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.tls_ca is not None:
                context.load_verify_locations(self.tls_ca.expanduser())
        except ssl.SSLError as error:
            raise ValueError(
                f"tls_ca must be a certificate (PEM), got {self.tls_ca}: {error}."
            ) from error
        try:
            if self.tls_cert is not None and self.tls_key is not None:
                context.load_cert_chain(
                    self.tls_cert.expanduser(), self.tls_key.expanduser(), password=""
                )
        except ssl.SSLError as error:
            raise ValueError(
                "tls_cert and tls_key must be a certificate and its key without a password (PEM), "
                f"got {self.tls_cert} and {self.tls_key}: {error}."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, with absolute paths and without the token itself."""
        values = {name: getattr(self, name) for name in Security.__dataclass_fields__}
        return {
            k: str(v.expanduser().absolute()) if isinstance(v, Path) else v
            for k, v in values.items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Security":
        return cls(**values)

    # These methods need grpc.

    def add_port(self, server: Any, address: str) -> str:
        """Make a grpc server (sync or aio) listen; return the address with its actual port."""
        self.check_listening(address)
        where = Address.parse(address)
        cause: RuntimeError | None = None
        port = 0
        with owner_only_socket(where):
            try:
                if self.tls_cert is None or self.tls_key is None or where.path:
                    port = server.add_insecure_port(address)
                else:
                    port = server.add_secure_port(address, self._server_credentials())
            except RuntimeError as error:
                cause = error
        if not port:
            socket.socket().close()  # raises its own OSError if no descriptor is left
            raise OSError(
                f"Cannot listen at {address}: the port may be in use, or the host may not be this "
                "machine; name another address."
            ) from cause
        return address if where.path else f"{address.rpartition(':')[0]}:{port}"

    def _server_credentials(self) -> Any:
        files = [self.tls_key, self.tls_cert, *([self.tls_ca] if self.tls_client_certs else [])]
        paths = [path for path in files if path is not None]

        def read() -> tuple[bytes, bytes, bytes | None]:
            self._check_certificates()  # only one of the two files may be new yet
            key, cert, *ca = [read_file(path, "tls_key, tls_cert, tls_ca") for path in paths]
            return key, cert, (ca[0] if ca else None)

        return server_credentials(paths, read, self.tls_client_certs)

    def aio_channel(self, address: str, limits: Limits) -> Any:
        """Return a grpc.aio channel to an address."""
        import grpc
        import grpc.aio

        self.check_dialing(address)
        where = Address.parse(address)
        authority = None if where.path else self.tls_ca  # None: no TLS
        options = channel_options(limits)
        # A proxy from the environment variables is used only for TLS to other machines.
        may_use_proxy = authority is not None and not where.is_local
        options.append(("grpc.enable_http_proxy", int(may_use_proxy)))
        if self.tls_server_name:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        if authority is None:
            return grpc.aio.insecure_channel(address, options=options)
        key = read_file(self.tls_key, "tls_key") if self.tls_key else None
        cert = read_file(self.tls_cert, "tls_cert") if self.tls_cert else None
        credentials = grpc.ssl_channel_credentials(read_file(authority, "tls_ca"), key, cert)
        return grpc.aio.secure_channel(address, credentials, options=options)


def read_file(path: Path, name: str) -> bytes:
    """Return what is in a file; raise ValueError, which calls it `name`, if it cannot be read."""
    return _read(path, name)[0]


def read_private_file(path: Path, name: str) -> bytes:
    """As `read_file`, but also raise ValueError if other users can read the file."""
    data, mode = _read(path, name)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{name} must be readable by its owner only, {path} has mode {mode:04o}; "
            f"run: chmod 600 {shlex.quote(str(path))}"
        )
    return data


def _read(path: Path, name: str) -> tuple[bytes, int]:
    """Return what is in a file, and its mode."""
    try:
        with path.expanduser().open("rb") as file:
            return file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {path}: {error}.") from error
