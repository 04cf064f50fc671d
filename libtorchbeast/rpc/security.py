"""Who may talk to whom: TLS and tokens.

Loopback and unix sockets are open. Any other address needs TLS and a token, unless `insecure` says
that the network is trusted. Nothing here imports grpc before a channel or a port is asked for.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast.rpc.address import Address, owner_only_socket
from libtorchbeast.rpc.limits import channel_options


@dataclass(frozen=True)
class Security:
    """What makes a connection safe. The same flags for learner and environments."""

    tls_ca: Path | None = None
    """Certificate of the authority that signed the other end's certificate (PEM)."""
    tls_cert: Path | None = None
    """This end's certificate (PEM); the end that listens needs one."""
    tls_key: Path | None = None
    """The private key of --tls_cert (PEM)."""
    tls_server_name: str | None = None
    """The name in the listening end's certificate, if it is not the address's."""
    tls_client_certs: bool = False
    """Listening: also demand a certificate of those who dial, signed by --tls_ca."""
    token_file: Path | None = None
    """File with the secret that both ends know (or set the variable TORCHBEAST_TOKEN)."""
    insecure: bool = False
    """Allow other machines without TLS or token; only for a network that you trust."""

    @classmethod
    def of(cls, flags: Any) -> "Security":
        """From flags that have the fields of this class among others."""
        return cls(**{name: getattr(flags, name) for name in cls.__dataclass_fields__})

    def read_token(self) -> str:
        if self.token_file is None:
            return os.environ.get("TORCHBEAST_TOKEN", "")
        token = read_file(self.token_file, "token_file").decode(errors="replace").strip()
        if not token:
            raise ValueError(f"token_file must hold a secret, {self.token_file} is empty.")
        return token

    def check_listening(self, address: str) -> None:
        """Raise ValueError with one sentence if listening there would be unsafe or cannot work."""
        where = Address.parse(address)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together, got only one; give both.")
        if self.tls_client_certs and (self.tls_ca is None or self.tls_cert is None):
            raise ValueError("tls_client_certs needs tls_ca, tls_cert and tls_key; give all three.")
        self._check_files()
        if not where.is_local and not self.insecure:
            if self.tls_cert is None:
                raise ValueError(
                    f"Listening for other machines needs TLS, and {address} has none; give "
                    "tls_cert and tls_key, or insecure for a network that you trust."
                )
            self._check_token(address)

    def check_dialing(self, address: str) -> None:
        """Raise ValueError with one sentence if dialing there would be unsafe or cannot work."""
        where = Address.parse(address)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together, got only one; give both.")
        self._check_files()
        if not where.is_local and not self.insecure:
            if self.tls_ca is None:
                raise ValueError(
                    f"Dialing another machine needs TLS, and {address} has none; give tls_ca, "
                    "or insecure for a network that you trust."
                )
            self._check_token(address)

    def _check_token(self, address: str) -> None:
        if not self.read_token():
            raise ValueError(
                f"Talking to other machines needs a token, and there is none for {address}; give "
                "token_file, set TORCHBEAST_TOKEN, or say insecure for a network that you trust."
            )

    def _check_files(self) -> None:
        for name in ("tls_ca", "tls_cert", "tls_key"):
            path = getattr(self, name)
            if path is not None:
                read_file(path, name)
        self._check_certificates()
        self.read_token()

    def _check_certificates(self) -> None:
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
        """Plain values; the token stays in its file or in the environment."""
        values = {name: getattr(self, name) for name in Security.__dataclass_fields__}
        return {
            k: str(v.expanduser().absolute()) if isinstance(v, Path) else v
            for k, v in values.items()
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Security":
        paths = ("tls_ca", "tls_cert", "tls_key", "token_file")
        typed: dict[str, Any] = {k: Path(v) if k in paths and v else v for k, v in values.items()}
        return cls(**typed)

    # The two below import grpc.

    def add_port(self, server: Any, address: str) -> str:
        """Let a grpc server (sync or aio) listen; returns the address, with its port."""
        import grpc

        self.check_listening(address)
        where = Address.parse(address)
        cause: RuntimeError | None = None
        port = 0
        with owner_only_socket(where):
            try:
                if self.tls_cert is None or self.tls_key is None or where.path:
                    port = server.add_insecure_port(address)
                else:
                    key = read_file(self.tls_key, "tls_key")
                    cert = read_file(self.tls_cert, "tls_cert")
                    ca = read_file(self.tls_ca, "tls_ca") if self.tls_ca else None
                    port = server.add_secure_port(
                        address,
                        grpc.ssl_server_credentials(
                            [(key, cert)],
                            ca if self.tls_client_certs else None,
                            self.tls_client_certs,
                        ),
                    )
            except RuntimeError as error:
                cause = error
        if not port:
            raise OSError(f"Cannot listen at {address}: is somebody else there?") from cause
        return address if where.path else f"{address.rpartition(':')[0]}:{port}"

    def aio_channel(self, address: str, max_message_bytes: int) -> Any:
        """A grpc.aio channel to an address."""
        import grpc
        import grpc.aio

        self.check_dialing(address)
        options = channel_options(max_message_bytes)
        if self.tls_server_name:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        if self.tls_ca is None or Address.parse(address).path:
            return grpc.aio.insecure_channel(address, options=options)
        key = read_file(self.tls_key, "tls_key") if self.tls_key else None
        cert = read_file(self.tls_cert, "tls_cert") if self.tls_cert else None
        credentials = grpc.ssl_channel_credentials(read_file(self.tls_ca, "tls_ca"), key, cert)
        return grpc.aio.secure_channel(address, credentials, options=options)


def read_file(path: Path, name: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {path}: {error}.") from error
