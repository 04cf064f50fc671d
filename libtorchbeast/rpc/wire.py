"""Protobuf's wire format: what the encoding and decoding of Steps and Rollouts share.

For encoding: fields with their tags, and arrays as they lie in memory. For decoding: the number of
fields in a message before it is parsed, and checks of its arrays and infos.
"""

import functools
import math
from typing import Any

import numpy as np

from libtorchbeast.episode_info import MAX_INFO_NAME_BYTES, MAX_NAMES, InfoSums, is_name
from libtorchbeast.observations import NumberRange
from libtorchbeast.rows import MAX_FLOAT32
from libtorchbeast.rpc.handshake import invalid
from libtorchbeast.specs import ArraySpec

LENGTH_DELIMITED = 2  # protobuf's wire type of bytes, messages and lists of numbers


def join_fields(fields: list[tuple[int, bytes]]) -> bytes:
    """Encode fields, each given by its tag and its data."""
    return b"".join(
        [part for field, data in fields for part in (field_tag(field, len(data)), data)]
    )


@functools.lru_cache
def field_tag(field: int, size: int) -> bytes:
    """Return the bytes that precede a field's data: its tag, and the size of the data."""
    return bytes([field]) + encode_varint(size)


def encode_varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def as_sent(array: np.ndarray) -> np.ndarray:
    """Return an array in little-endian C order, as on the wire; a copy only if needed."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def fields_in(data: bytes, start: int, end: int, most: int) -> list[tuple[int, int, int]]:
    """Return (tag, start, end) of each field in `data[start:end]`, without parsing its content.

    Raise `Refused` if there are more than `most`, or if these bytes are no message.
    """
    fields: list[tuple[int, int, int]] = []
    while start < end:
        if len(fields) == most:
            raise invalid(f"A message may have {most} fields here, got more.")
        tag, start = _decode_varint(data, start, end)
        length = {0: 0, 1: 8, 5: 4}.get(tag & 7)  # by wire type
        if tag & 7 in (0, LENGTH_DELIMITED):
            number, start = _decode_varint(data, start, end)
            length = number if tag & 7 else 0
        if length is None or start + length > end:
            raise invalid(f"Expected a message of env.proto, got {len(data)} other bytes.")
        fields.append((tag, start, start + length))
        start += length
    return fields


def _decode_varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the number that begins at `start`, and the index after its last byte."""
    number = 0
    for i in range(start, min(start + 10, end)):
        number |= (data[i] & 0x7F) << 7 * (i - start)
        if data[i] < 0x80:
            return number, i + 1
    raise invalid(f"Expected a message of env.proto, got {len(data)} other bytes.")


class ArrayReader:
    """Checks received bytes, and converts them to an array of a known dtype and shape [K, ...]."""

    def __init__(
        self, spec: ArraySpec, num_envs: int, name: str, range: NumberRange | None
    ) -> None:
        """All numbers must be in the `range`; None: any number is allowed."""
        self._range = range
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._shape = (num_envs, *spec.shape)
        self.num_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._kind = self._dtype.kind
        self._name = name

    def read(self, data: Any) -> np.ndarray:
        """Return an array that shares memory with `data`; raise `Refused` if it breaks a rule."""
        if len(data) != self.num_bytes:
            raise invalid(
                f"{self._name} must have {self.num_bytes} bytes "
                f"({self._dtype.name}{list(self._shape)}), got {len(data)}."
            )
        if self._kind == "b" and np.frombuffer(data, np.uint8).max() > 1:
            raise invalid(f"{self._name} is bool: every byte must be 0 or 1, got another.")
        array = np.ndarray(self._shape, self._dtype, data)
        if self._range is not None and not self._range.holds(array):
            raise invalid(f"{self._range.complaint(self._name, array)}.")
        return array


def read_info(infos: Any, num_envs: int) -> InfoSums:
    """Return the sums in the infos of a message; raise `Refused` if one breaks a rule."""
    if len(infos) > MAX_NAMES:
        raise invalid(f"A message may have {MAX_NAMES} infos, got {len(infos)}.")
    sums: InfoSums = {}
    for info in infos:
        if not is_name(info.name):
            raise invalid(f"An info's name must be 1 to {MAX_INFO_NAME_BYTES} printable bytes.")
        if not 1 <= info.count <= num_envs:
            raise invalid(f"An info's count must be from 1 to {num_envs}, got {info.count}.")
        if not abs(info.total) <= MAX_FLOAT32:
            raise invalid(f"An info's total must be a finite float32, got {info.total:g}.")
        sums[info.name] = (info.total, info.count)
    return sums
