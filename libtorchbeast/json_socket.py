"""Messages between processes of this machine: JSON over a unix socket, with descriptors attached.

A message is four bytes of length and that many bytes of JSON. What brings a descriptor has it
attached to its first byte, so that one lost on the way is missed by its own message and no other.
"""

import contextlib
import json
import os
import socket
import threading
from collections import deque
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20
_MAX_FDS = 8


class UnknownProtocol(ValueError):
    """The bytes are no such message: somebody speaks another language, HTTP/2 perhaps."""


class JsonSocket:
    """One end of the connection. Nothing here waits: `send` and `flush` send what they can.

    Any thread may send, one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._sending = threading.Lock()
        self._incoming = bytearray()
        self._fd: int | None = None  # that came with the message in the making

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, fd: int | None = None, **values: Any) -> None:
        """OSError if the other end is gone."""
        text = json.dumps({"kind": kind, "has_fd": fd is not None, **values}).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"A message has {MAX_MESSAGE_BYTES} bytes at most, got {len(text)}.")
        # A copy, as the message may be sent later than the caller closes its own.
        fds = [] if fd is None else [os.dup(fd)]
        self._outgoing.append((len(text).to_bytes(4, "little") + text, fds))
        self.flush()

    def try_send(self, kind: str, **values: Any) -> None:
        """A last word, as far as anybody is there to hear it."""
        with contextlib.suppress(OSError):
            self.send(kind, **values)

    def flush(self) -> None:
        with self._sending:
            while self._outgoing:
                data, fds = self._outgoing[0]
                try:
                    num_sent = socket.send_fds(self._socket, [data], fds)
                except BlockingIOError:
                    return
                _close(fds)
                if num_sent < len(data):
                    self._outgoing[0] = (data[num_sent:], [])
                else:
                    self._outgoing.popleft()

    def next(self) -> dict[str, Any] | None:
        """The next message, if one has come.

        A message that says so has a descriptor, "fd", which is None if it was lost on the way.
        EOFError if the other end is gone, `UnknownProtocol` if it speaks another language.
        """
        self.flush()
        while missing := self._num_missing():
            try:
                # Never past the end of a message: descriptors come with what they belong to.
                data, fds, _, _ = socket.recv_fds(self._socket, missing, _MAX_FDS)
            except BlockingIOError:
                return None
            except ConnectionError:
                data, fds = b"", []
            if fds and self._fd is None:
                self._fd = fds.pop(0)
            _close(fds)
            if not data:
                raise EOFError
            self._incoming += data
        return self._take_message()

    def close(self) -> None:
        for _, fds in self._outgoing:
            _close(fds)
        self._outgoing.clear()
        self._drop_fd()
        self._socket.close()

    def _num_missing(self) -> int:
        """Bytes to the end of the message in the making, or of its length."""
        if len(self._incoming) < 4:
            return 4 - len(self._incoming)
        length = int.from_bytes(self._incoming[:4], "little")
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise UnknownProtocol(f"Messages have 1 to {MAX_MESSAGE_BYTES} bytes, got {length}.")
        return 4 + length - len(self._incoming)

    def _take_message(self) -> dict[str, Any]:
        text, self._incoming = bytes(self._incoming[4:]), bytearray()
        try:
            message = json.loads(text)
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise UnknownProtocol("A message is a JSON object with a kind.")
        except (ValueError, RecursionError) as error:
            raise UnknownProtocol(f"A message is JSON: {error}") from error
        message.pop("fd", None)  # only the kernel brings descriptors
        if message.get("has_fd"):
            message["fd"], self._fd = self._fd, None
        self._drop_fd()
        return message

    def _drop_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
