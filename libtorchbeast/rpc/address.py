"""Addresses, `unix:/path` or `host:port`, and the unix sockets of this machine."""

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

DIAL_S = 5.0
MAX_PATH = 107  # bytes of a unix socket's path


@dataclass(frozen=True)
class Address:
    """`unix:/path`, or `host:port` (IPv6 in brackets)."""

    text: str
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address; raise ValueError with one sentence if `text` is not one."""
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
            return False  # a name, which may stand for any machine


def server_address(basename: str, number: int) -> str:
    """Return the address of a server: `unix:/path.<number>`, or `host:(port + number)`."""
    where = Address.parse(basename)
    if where.path:
        return f"{basename}.{number}"
    return f"{basename.rpartition(':')[0]}:{where.port + number}"


def listening_address(address: str, number: int) -> str:
    """Return where program `number` listens if several programs on a machine share one address.

    Program 0 listens at `address`, program 1 at the next port or at `<path>.1`, and so on. Port 0
    means any free port, for each of them.
    """
    where = Address.parse(address)
    is_any_port = not where.path and where.port == 0
    return address if number == 0 or is_any_port else server_address(address, number)


def is_ours(path: str) -> bool:
    """Whether a unix socket belongs to this user or to root, and so can be trusted."""
    return os.stat(path).st_uid in (os.geteuid(), 0)


@contextlib.contextmanager
def owner_only_socket(address: Address) -> Iterator[None]:
    """Context in which to bind a unix socket: a stale one is removed, other users are kept out.

    For a `host:port` the context does nothing.
    """
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
    """Remove a unix socket at which no process listens.

    Raise OSError if a process listens there, or if the path is not a socket.
    """
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
    raise _taken(path)


def _taken(path: str) -> OSError:
    return OSError(
        f"Cannot listen at unix:{path}: another process listens there; end it or name another path."
    )


def listen_unix(address: str) -> socket.socket:
    """Return a listening unix socket for this user only; raise OSError with one sentence.

    The socket is bound under a temporary name and renamed once it listens: a socket that is bound
    but does not listen yet would look stale to other processes.
    """
    where = Address.parse(address)
    listener = socket.socket(socket.AF_UNIX)
    unfinished = f"{where.path}~{secrets.token_hex(4)}"
    if len(os.fsencode(unfinished)) > MAX_PATH:
        unfinished = where.path
    try:
        with owner_only_socket(where):
            listener.bind(unfinished)
        listener.listen(1024)
        listener.setblocking(False)
        if unfinished != where.path:
            _rename_socket(unfinished, where.path)
    except BaseException:
        listener.close()
        raise
    return listener


def _rename_socket(old: str, new: str) -> None:
    """Rename a unix socket; raise OSError if another process has just taken the new name."""
    try:
        try:
            os.link(old, new)  # fails if `new` exists, where `rename` would replace it
        except FileExistsError:
            remove_stale_socket(new)
            os.link(old, new)
    except FileExistsError as error:
        raise _taken(new) from error
    finally:
        os.unlink(old)


def dial_unix(path: str) -> socket.socket:
    """Connect to a unix socket of this user or of root; raise OSError if that fails."""
    if not is_ours(path):
        raise PermissionError(
            f"The socket {path} belongs to another user, so it is not dialled; name another."
        )
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(DIAL_S)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def speaks_http2(connection: socket.socket) -> bool:
    """Whether a client speaks gRPC, by its first bytes.

    These must have arrived, and can still be read afterwards.
    """
    return connection.recv(4, socket.MSG_PEEK) == b"PRI "
