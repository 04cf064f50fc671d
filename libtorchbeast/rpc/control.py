"""What the learner's process and a gateway tell each other: JSON, and descriptors of lanes.

A message is four bytes of length and that many bytes of JSON; a message that brings a descriptor
has it attached to its bytes. Both ends are this package's own: no byte here is from the network.
"""

import json
import os
import socket
from collections import deque
from typing import Any

_MAX_FDS = 64


class ControlSocket:
    """One end of the connection. Nothing here waits: `send` and `flush` send what they can."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._incoming = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, fd: int | None = None, **values: Any) -> None:
        """OSError if the other end is gone."""
        text = json.dumps({"kind": kind, "has_fd": fd is not None, **values}).encode()
        # A copy, as the message may be sent later than the caller closes its own.
        fds = [] if fd is None else [os.dup(fd)]
        self._outgoing.append((len(text).to_bytes(4, "little") + text, fds))
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                num_sent = socket.send_fds(self._socket, [data], fds)
            except BlockingIOError:
                return
            for fd in fds:
                os.close(fd)
            if num_sent < len(data):
                self._outgoing[0] = (data[num_sent:], [])
            else:
                self._outgoing.popleft()

    def receive(self) -> list[dict[str, Any]]:
        """What came; a descriptor is the message's "fd". EOFError if the other end is gone."""
        ended = False
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_FDS)
            except BlockingIOError:
                break
            except ConnectionError:
                data, fds = b"", []
            self._fds.extend(fds)
            self._incoming += data
            if not data:
                ended = True
                break
        messages = self._whole_messages()
        if ended and not messages:
            raise EOFError
        return messages

    def close(self) -> None:
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        while self._fds:
            os.close(self._fds.popleft())
        self._outgoing.clear()
        self._socket.close()

    def _whole_messages(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._incoming) >= 4:
            end = 4 + int.from_bytes(self._incoming[:4], "little")
            if len(self._incoming) < end:
                break
            message = json.loads(self._incoming[4:end])
            del self._incoming[:end]
            if message["has_fd"]:
                message["fd"] = self._fds.popleft()
            messages.append(message)
        return messages
