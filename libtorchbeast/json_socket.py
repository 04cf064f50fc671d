"""Messages between processes of this machine: JSON over a unix socket, with descriptors attached.

A message is its length, in four little-endian bytes, and that many bytes of JSON. A descriptor is
attached to the first byte of its message, so one that is lost on the way affects no other message.
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
    """The bytes are not such a message: the peer speaks another protocol, such as HTTP/2."""


class JsonSocket:
    """One end of a connection. No method waits: `send` and `flush` send what they can.

    Any thread may send, but only one may receive.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._sending = threading.Lock()
        self._incoming = bytearray()
        self._fd: int | None = None  # received with the message that is not yet complete

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, fd: int | None = None, **values: Any) -> None:
        """Queue a message and send what can be sent; OSError if the other end is gone."""
        text = json.dumps({"kind": kind, "has_fd": fd is not None, **values}).encode()
        if len(text) > MAX_MESSAGE_BYTES:
            raise ValueError(f"A message has {MAX_MESSAGE_BYTES} bytes at most, got {len(text)}.")
        # A copy, because the caller may close its descriptor before the message is sent.
        fds = [] if fd is None else [os.dup(fd)]
        self._outgoing.append((len(text).to_bytes(4, "little") + text, fds))
        self.flush()

    def try_send(self, kind: str, **values: Any) -> None:
        """Send a message unless the other end is gone."""
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
        """Return the next message, or None if none has come as a whole.

        A message that was sent with a descriptor has it as "fd", None if it was lost on the way.
        Raises EOFError if the other end is gone, `UnknownProtocol` if it sent something else.
        """
        self.flush()
        while missing := self._num_missing():
            try:
                # Never past the end of a message, so that a descriptor belongs to this message.
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
        """The number of bytes until the message being received, or its length, is complete."""
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
        message.pop("fd", None)  # a descriptor comes from the kernel, never from JSON
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
