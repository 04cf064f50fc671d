"""Messages of env.proto byte by byte: what Steps and Rollouts, which are large, have in common.

Written: fields with their tags, and arrays as they lie in memory. Read: how many fields there are,
before they are parsed; then arrays and infos, which are checked.
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
    return b"".join(
        [part for field, data in fields for part in (field_tag(field, len(data)), data)]
    )


@functools.lru_cache
def field_tag(field: int, size: int) -> bytes:
    """The bytes before a field of so many bytes."""
    return bytes([field]) + encode_varint(size)


def encode_varint(number: int) -> bytes:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def as_sent(array: np.ndarray) -> np.ndarray:
    """An array whose memory is what the wire wants; the same one if it lies so already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def fields_in(data: bytes, start: int, end: int, most: int) -> list[tuple[int, int, int]]:
    """The tag, start and end of each field between two bytes of a message; `Refused`."""
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
    """A number, and where it ends."""
    number = 0
    for i in range(start, min(start + 10, end)):
        number |= (data[i] & 0x7F) << 7 * (i - start)
        if data[i] < 0x80:
            return number, i + 1
    raise invalid(f"Expected a message of env.proto, got {len(data)} other bytes.")


class ArrayReader:
    """Bytes from outside to an array of a known dtype and shape [K, ...]."""

    def __init__(
        self, spec: ArraySpec, num_envs: int, name: str, range: NumberRange | None
    ) -> None:
        """All numbers must be in the `range`, if there is one."""
        self._range = range
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._shape = (num_envs, *spec.shape)
        self.num_bytes = math.prod(self._shape) * self._dtype.itemsize
        self._kind = self._dtype.kind
        self._name = name

    def read(self, data: Any) -> np.ndarray:
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
