"""Relays gRPC connections from a unix socket that serves other clients, too.

At a unix socket our own programs hand lanes over (json_socket.py), and clients in other languages
speak gRPC. Python's grpc cannot serve a connection that other code has accepted, so gRPC clients
are relayed to a second socket, of grpc's own, in a folder that no other user can enter.
"""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

CHUNK_BYTES = 1 << 18


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """Yield an address in a temporary private folder, for grpc to listen at."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder:
        yield f"unix:{os.path.join(folder, 'grpc')}"


async def relay(connection: socket.socket, address: str) -> None:
    """Copy bytes between a connection and a new one to `address`, and close both at the end."""
    connection.setblocking(False)
    outer = await asyncio.open_unix_connection(sock=connection)
    try:
        inner = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    except OSError:
        outer[1].close()
        return
    try:
        there = asyncio.create_task(_copy(outer[0], inner[1]))
        back = asyncio.create_task(_copy(inner[0], outer[1]))
        try:
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
    finally:
        for writer in (outer[1], inner[1]):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
