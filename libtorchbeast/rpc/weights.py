"""Weights on their way from the learner's shared memory to actors: whole versions, in pieces.

    Publication   at a gateway: what the learner has published, as actors are sent it
    Assembly      at an actor: the pieces of a version become whole again

The learner writes as it likes, and waits for nobody. A reader copies, and throws the copy away if a
new version was begun meanwhile (torchbeast/runtime/shared_weights.py). Each version is copied and
encoded once, however many actors want it; who reads slowly keeps the one that it began with.
"""

import asyncio
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from libtorchbeast.rollouts import ModelOffer, TensorSpec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import Refused, invalid
from libtorchbeast.shared_memory import fence

CHUNK_BYTES = 1 << 18  # small enough for other messages to come through between two
LOOK_S = 0.005  # between two looks for a new version
RETRY_S = 0.001  # the learner is in the middle of its copy
COPY_S = 10.0  # until there must have been a whole version
WEIGHTS_DTYPES = ("float32", "bfloat16")
BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Version:
    """All weights of one version, as they are sent."""

    number: int
    data: bytes
    checksum: int

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Where each begins, and its bytes."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            yield start, self.data[start : start + CHUNK_BYTES]


class Publication:
    """The learner's weights, in a gateway's event loop."""

    def __init__(self, fd: int, offer: ModelOffer) -> None:
        """`fd` belongs to it from here on."""
        self.offer = offer
        try:
            self._memory = np.frombuffer(mmap.mmap(fd, offer.weights_bytes), np.uint8)
        finally:
            os.close(fd)
        self._begun, self._finished = self._memory[:16].view(np.int64)[:, None]
        self._newest: dict[str, Version] = {}  # by the dtype that is wanted
        self._copying = asyncio.Lock()
        self._looking: asyncio.Future[None] | None = None

    @property
    def version(self) -> int:
        """The newest that is whole."""
        return int(self._finished[0])

    async def after(self, have: int, dtype: str) -> Version:
        """The newest weights, once they are newer than those."""
        while self.version <= have:
            await self._next_version()
        async with self._copying:
            newest = self._newest.get(dtype)
            if newest is None or newest.number < self.version:
                # In a thread: other streams need not wait while many bytes are copied.
                newest = await asyncio.to_thread(self._copy, dtype)
                self._newest[dtype] = newest
            return newest

    async def _next_version(self) -> None:
        """Until another one is published. One task looks for all who wait."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look(self.version))
        await asyncio.shield(self._looking)

    async def _look(self, version: int) -> None:
        while self.version == version:
            await asyncio.sleep(LOOK_S)

    def _copy(self, dtype: str) -> Version:
        deadline = time.monotonic() + COPY_S
        while True:
            version = self.version
            fence()
            copied = self._memory.copy()
            fence()
            if int(self._begun[0]) == version:
                break
            if time.monotonic() > deadline:
                raise Refused("UNAVAILABLE", "The learner is writing its weights; try again.")
            time.sleep(RETRY_S)
        data = b"".join(self._encode(tensor, copied, dtype) for tensor in self.offer.tensors)
        return Version(version, data, zlib.crc32(data))

    def _encode(self, tensor: TensorSpec, memory: np.ndarray, dtype: str) -> bytes:
        numbers = memory[tensor.offset : tensor.offset + tensor.num_bytes].view(tensor.dtype)
        if sent_dtype(tensor, dtype) == BFLOAT16:
            return _to_bfloat16(numbers).tobytes()
        return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes()


def sent_dtype(tensor: TensorSpec, wanted: str) -> str:
    """Parameters may be rounded; statistics, and what else stands beside them, are not."""
    is_rounded = wanted == BFLOAT16 and tensor.is_parameter and tensor.dtype == "float32"
    return BFLOAT16 if is_rounded else tensor.dtype


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The upper half of each float32, rounded to the nearest, ties to even; as uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


class Assembly:
    """Puts the pieces of one version after the other together. `Refused` for what breaks a rule."""

    def __init__(self, num_bytes: int) -> None:
        """Of a version, as it is sent."""
        self._num_bytes = num_bytes
        self._version = -1
        self._data = bytearray()

    def add(self, piece: pb.Weights) -> tuple[int, bytes] | None:
        """The version and its bytes, when this was the last piece."""
        if not self._data:
            self._version = piece.version
        what = (piece.version, piece.num_bytes, piece.offset)
        expected = (self._version, self._num_bytes, len(self._data))
        if what != expected or piece.version < 0 or not piece.data:
            raise invalid(
                f"A piece of weights must be of version, size and offset {expected}, and not "
                f"empty, got {what} and {len(piece.data)} bytes."
            )
        if len(self._data) + len(piece.data) > self._num_bytes:
            raise invalid(f"Weights must have {self._num_bytes} bytes, got more.")
        self._data += piece.data
        if len(self._data) < self._num_bytes:
            return None
        data, self._data = bytes(self._data), bytearray()
        if zlib.crc32(data) != piece.checksum:
            raise invalid(f"The checksum of version {self._version} of the weights is wrong.")
        return self._version, data
