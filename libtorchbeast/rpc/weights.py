"""How weights get from the learner's shared memory to actors: whole versions, sent in pieces.

    Publication   at a gateway: the published weights, encoded for actors
    Assembly      at an actor: joins the pieces of a version

The learner writes its weights without waiting for readers. A reader copies them, and discards the
copy if the learner has begun a new version meanwhile (torchbeast/runtime/shared_weights.py). Each
version is copied and encoded once, however many actors want it. An actor that reads slowly still
gets all pieces of the version that it began with.
"""

import asyncio
import mmap
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from libtorchbeast.rollout_layout import ModelOffer, TensorSpec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import Refused, invalid
from libtorchbeast.shared_memory import fence

CHUNK_BYTES = 1 << 18  # of a piece, small enough that other messages get through in between
LOOK_S = 0.005  # between two checks for a new version
RETRY_S = 0.001  # before another copy, as the learner was writing during the last one
COPY_S = 10.0  # until a whole version must have been copied
WEIGHTS_DTYPES = ("float32", "bfloat16")
BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Version:
    """All weights of one version, encoded for the wire."""

    number: int
    data: bytes
    checksum: int

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each piece."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            yield start, self.data[start : start + CHUNK_BYTES]


class Publication:
    """The weights that the learner publishes, as read in a gateway's event loop."""

    def __init__(self, fd: int, offer: ModelOffer) -> None:
        """Map the shared memory of the weights, and close `fd`."""
        self.offer = offer
        try:
            self._memory = np.frombuffer(mmap.mmap(fd, offer.weights_bytes), np.uint8)
        finally:
            os.close(fd)
        self._begun, self._finished = self._memory[:16].view(np.int64)[:, None]
        self._newest: dict[str, Version] = {}  # by the requested dtype
        self._copying = asyncio.Lock()
        self._looking: asyncio.Future[None] | None = None

    @property
    def version(self) -> int:
        """The newest version that the learner has finished writing."""
        return int(self._finished[0])

    async def after(self, have: int, dtype: str) -> Version:
        """Wait for weights that are newer than version `have`, and return the newest ones."""
        while self.version <= have:
            await self._next_version()
        async with self._copying:
            newest = self._newest.get(dtype)
            if newest is None or newest.number < self.version:
                # In a thread, so that other streams need not wait for the copy.
                newest = await asyncio.to_thread(self._copy, dtype)
                self._newest[dtype] = newest
            return newest

    async def _next_version(self) -> None:
        """Wait until another version is published; one task checks for all that wait."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look(self.version))
        await asyncio.shield(self._looking)

    async def _look(self, version: int) -> None:
        while self.version == version:
            await asyncio.sleep(LOOK_S)

    def _copy(self, dtype: str) -> Version:
        """Copy and encode the newest version; raise `Refused` if none is whole for too long."""
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
    """Return a tensor's dtype on the wire, if actors request `wanted`.

    Only parameters are rounded to bfloat16, not buffers such as statistics.
    """
    is_rounded = wanted == BFLOAT16 and tensor.is_parameter and tensor.dtype == "float32"
    return BFLOAT16 if is_rounded else tensor.dtype


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to bfloat16, ties to even; return their bits as uint16."""
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


class Assembly:
    """Joins the pieces of weights, one version after the other."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` is the size of a version on the wire."""
        self._num_bytes = num_bytes
        self._version = -1
        self._data = bytearray()

    def add(self, piece: pb.Weights) -> tuple[int, bytes] | None:
        """Add a piece; after the last one, return the version's number and bytes, else None.

        Raise `Refused` for a piece that does not follow the one before, or a wrong checksum.
        """
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
