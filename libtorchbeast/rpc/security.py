"""Who may talk to whom, and how much: addresses, TLS, tokens, limits.

Loopback and unix sockets are open. Any other address needs TLS and a token, unless `insecure` says
that the network is trusted. Nothing here imports grpc before a channel or a port is asked for.
"""

import contextlib
import hmac
import ipaddress
import os
import socket
import ssl
import stat
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast.rpc.messages import Refused

MAX_TRACKED_PEERS = 10_000


@dataclass(frozen=True)
class Address:
    """`unix:/path`, or `host:port` (IPv6 in brackets)."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Raises ValueError with one sentence."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            path = path.removeprefix("//") if path.startswith("///") else path
            if path:
                return cls(text, path=path)
        else:
            host, colon, port = text.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            if colon and host and port.isdecimal() and int(port) < 1 << 16 and "/" not in host:
                return cls(text, host=host, port=int(port))
        raise ValueError(f"An address is unix:/path or host:port, got {text!r}.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine's users can be at the other end."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: who knows what it stands for


def server_address(basename: str, number: int) -> str:
    """`unix:/path.<number>`, or `host:(port + number)`."""
    where = Address.parse(basename)
    if where.path:
        return f"{basename}.{number}"
    return f"{basename.rpartition(':')[0]}:{where.port + number}"


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

    # The three below import grpc.

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

    def channel(self, address: str, max_message_bytes: int) -> Any:
        """A grpc channel to an address."""
        import grpc

        return self._channel(grpc, address, max_message_bytes)

    def aio_channel(self, address: str, max_message_bytes: int) -> Any:
        """A grpc.aio channel to an address."""
        import grpc
        import grpc.aio

        return self._channel(grpc.aio, address, max_message_bytes)

    def _channel(self, module: Any, address: str, max_message_bytes: int) -> Any:
        import grpc

        self.check_dialing(address)
        options = channel_options(max_message_bytes)
        if self.tls_server_name:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        if self.tls_ca is None or Address.parse(address).path:
            return module.insecure_channel(address, options=options)
        key = read_file(self.tls_key, "tls_key") if self.tls_key else None
        cert = read_file(self.tls_cert, "tls_cert") if self.tls_cert else None
        credentials = grpc.ssl_channel_credentials(read_file(self.tls_ca, "tls_ca"), key, cert)
        return module.secure_channel(address, credentials, options=options)


@dataclass(frozen=True)
class Limits:
    """How much one gateway or server takes on."""

    max_message_bytes: int = 64 << 20
    """Of one message."""
    max_streams: int = 1024
    """Open at once."""
    connections_per_s: float = 200.0
    """New streams from one host, in the long run."""
    connections_at_once: int = 1024
    """New streams from one host, in a burst."""
    handshake_s: float = 20.0
    """Until somebody who dialled must have introduced himself."""
    build_s: float = 600.0
    """Until environments that we dialled must have: they are made first."""
    step_s: float = 600.0
    """Until environments must have taken a step."""
    write_s: float = 60.0
    """Until the other end must have read what was sent to it."""
    keepalive_s: float = 10.0
    """Until a silent connection is asked for a sign of life, and again until it is given up."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")


def check_token(expected: str, given: str) -> None:
    """Raise `Refused` unless they are the same, in a time that tells nothing about how alike."""
    if expected and not hmac.compare_digest(expected.encode(), given.encode()):
        what = "another one" if given else "none"
        raise Refused(
            "UNAUTHENTICATED", f"The token must be this end's, got {what}; give both ends the same."
        )


def host_of(peer: str) -> str:
    """The host of a peer, as grpc names it."""
    return peer if peer.startswith("unix") else peer.rpartition(":")[0]


def is_ours(path: str) -> bool:
    """Whether a unix socket belongs to this user or to root: others may be anybody."""
    return os.stat(path).st_uid in (os.geteuid(), 0)


class Strangers:
    """Those who have not introduced themselves: nobody may take all places without a word."""

    def __init__(self, limits: Limits) -> None:
        self._most = max(1, limits.max_streams // 2)
        self._hosts: Counter[str] = Counter()

    @contextlib.contextmanager
    def meet(self, peer: str) -> Iterator[None]:
        """While a peer (as grpc names it) is one; `Refused` if its host has too many of them."""
        host = host_of(peer)
        if self._hosts[host] >= self._most:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"{self._most} streams from {host} have not introduced themselves; wait.",
            )
        self._hosts[host] += 1
        try:
            yield
        finally:
            self._hosts[host] -= 1
            self._hosts += Counter()  # forget those with none


class ConnectionRate:
    """Counts what each host opens; a bucket a host, which refills as time passes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, when

    def take(self, peer: str) -> None:
        """Raise `Refused` if this peer (as grpc names it) opens too many streams."""
        host = host_of(peer)
        now = time.monotonic()
        tokens, then = self._buckets.pop(host, (float(self._limits.connections_at_once), now))
        rate = self._limits.connections_per_s
        tokens = min(tokens + (now - then) * rate, self._limits.connections_at_once)
        # A refusal costs nothing: who is refused and calls again gets through when it is time.
        self._buckets[host] = (tokens if tokens < 1 else tokens - 1, now)
        if len(self._buckets) > MAX_TRACKED_PEERS:
            self._buckets.pop(next(iter(self._buckets)))  # whoever was silent the longest
        if tokens < 1:
            raise Refused(
                "RESOURCE_EXHAUSTED",
                f"A host may open {rate:g} streams a second, got more from {host}; wait a little.",
            )


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """For the end that dials: find out when the other is gone, and try again soon."""
    return [
        *_message_options(max_message_bytes),
        *_keepalive_options(Limits().keepalive_s),
        ("grpc.use_local_subchannel_pool", 1),  # a connection of one's own
        ("grpc.enable_retries", 0),
    ]


def server_options(limits: Limits, share_port: bool = False) -> list[tuple[str, Any]]:
    """For the end that listens."""
    return [
        *_message_options(limits.max_message_bytes),
        *_keepalive_options(limits.keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * limits.keepalive_s)),
        ("grpc.http2.max_ping_strikes", 0),  # a learner that thinks for a while is no attack
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.so_reuseport", int(share_port)),
    ]


def _message_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.max_frame_size", 1 << 20),  # pieces of 16 KiB take both ends more time
    ]


def _keepalive_options(seconds: float) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", int(1000 * seconds)),
        ("grpc.keepalive_timeout_ms", int(1000 * seconds)),
        ("grpc.http2.ping_timeout_ms", int(1000 * seconds)),  # of pings for other purposes
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


@contextlib.contextmanager
def owner_only_socket(address: Address) -> Iterator[None]:
    """While a unix socket is made: for its owner only, in the place of one that nobody uses."""
    if not address.path:
        yield
        return
    remove_stale_socket(address.path)
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def remove_stale_socket(path: str) -> None:
    """Remove a socket that nobody listens at; OSError if somebody does, or if it is none."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"Cannot listen at unix:{path}: it is a file; name another path.")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except TimeoutError:
            pass
        except PermissionError as error:
            raise OSError(
                f"Cannot listen at unix:{path}: another user's socket is there; name another path."
            ) from error
    raise OSError(f"Cannot listen at unix:{path}: somebody listens there; name another path.")


def read_file(path: Path, name: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"{name} must be a file that can be read, got {path}: {error}.") from error
