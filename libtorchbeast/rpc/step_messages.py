"""Steps and actions to and from the wire: encoding, decoding and checks.

Observations are most of the bytes. `encode_step` copies them once, behind the small fields of the
Step; protobuf's own encoder copies them three times, which took a sixth of a server's CPU
(`benchmarks/remote.py`). For decoding, protobuf is as fast as anything else.
"""

import math
import sys
from typing import Any

import numpy as np

import nest
from libtorchbeast.episode_info import MAX_NAMES, InfoSums
from libtorchbeast.observations import NumberRange
from libtorchbeast.rows import MAX_FLOAT32, MAX_INT32, MAX_NUMBER, NUMBERS, Row, Spec, Unstacked
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import MAX_TEXT, invalid
from libtorchbeast.rpc.messages import check_kind, check_no_failure, parse
from libtorchbeast.rpc.wire import (
    LENGTH_DELIMITED,
    ArrayReader,
    as_sent,
    encode_varint,
    field_tag,
    fields_in,
    join_fields,
    read_info,
)
from libtorchbeast.specs import ArraySpec

_TAGS = {f.name: f.number << 3 | LENGTH_DELIMITED for f in pb.Step.DESCRIPTOR.fields}
_STEP = pb.EnvironmentMessage.STEP_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_ACTION = pb.Actions.ACTION_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_ACTIONS = pb.AgentMessage.ACTIONS_FIELD_NUMBER << 3 | LENGTH_DELIMITED
_FLOAT32 = np.dtype("<f4")
FINITE = NumberRange(-sys.float_info.max, sys.float_info.max)
MAX_EXTRA_BYTES_EACH = 64  # for each environment and each array, besides observations
MAX_UNCOUNTED_BYTES = 1 << 16  # of a message whose fields are not counted before it is parsed


def encode_step(row: Row, info: InfoSums | None = None) -> bytes:
    """Encode a row [K, ...] as an EnvironmentMessage.

    Observations may have any strides, or be `Unstacked`.
    """
    fields = [
        (_TAGS["reward"], np.asarray(row["reward"], _FLOAT32).tobytes()),
        (_TAGS["done"], np.asarray(row["done"], np.bool_).tobytes()),
        (_TAGS["episode_step"], b"".join(map(encode_varint, _listed(row["episode_step"])))),
        (_TAGS["episode_return"], np.asarray(row["episode_return"], _FLOAT32).tobytes()),
    ]
    truncated = np.asarray(row["truncated"], np.bool_).tobytes()
    if any(truncated):
        fields.append((_TAGS["truncated"], truncated))
    for name, (total, count) in (info or {}).items():
        entry = pb.Info(name=name, total=total, count=count)
        fields.append((_TAGS["info"], entry.SerializeToString()))
    head = join_fields(fields)
    parts: list[Any] = [head]
    size = len(head)
    for leaf in nest.flatten(row["frame"]):
        arrays = leaf.arrays if isinstance(leaf, Unstacked) else [leaf]
        num_bytes = len(arrays) * arrays[0].nbytes
        tag = field_tag(_TAGS["observation"], num_bytes)
        parts += [tag, *map(as_sent, arrays)]
        size += len(tag) + num_bytes
    return b"".join([field_tag(_STEP, size), *parts])


def _listed(numbers: Any) -> list[int]:
    return numbers if type(numbers) is list else numbers.tolist()


def encode_actions(actions: Any) -> bytes:
    """Encode actions, a nest of arrays [K, ...], as an AgentMessage."""
    leaves = join_fields([(_ACTION, as_sent(leaf).tobytes()) for leaf in nest.flatten(actions)])
    return field_tag(_ACTIONS, len(leaves)) + leaves


class StepReader:
    """Checks the Steps of one stream, and writes them to the rows of a lane."""

    def __init__(self, spec: Spec, num_envs: int, rows: Row) -> None:
        self._rows = rows
        self._num_envs = num_envs
        self._leaves = nest.flatten(rows["frame"])
        self._arrays = [
            ArrayReader(leaf_spec, num_envs, f"Observation {i}", NumberRange.of(leaf_spec))
            for i, leaf_spec in enumerate(nest.flatten(spec.observation))
        ]
        self._max_fields = len(NUMBERS) * num_envs + len(self._arrays) + MAX_NAMES
        self._max_extra = MAX_EXTRA_BYTES_EACH * (len(self._arrays) + num_envs) + 4 * MAX_TEXT
        num_bytes = sum(array.num_bytes for array in self._arrays)
        self._max_bytes = num_bytes + self._max_extra
        self._is_first = True
        self.info: InfoSums = {}
        """Figures of the episodes that ended in the last Step read."""

    def read(self, data: bytes) -> None:
        """Write the Step in a message to the lane; `data` is not trusted.

        Raise `EnvironmentFailed` if the message is a Failure, `Refused` if it breaks a rule.
        """
        step = self._step_in(data)
        observations = step.observation
        if len(observations) != len(self._arrays):
            raise invalid(
                f"A Step must have {len(self._arrays)} observations, got {len(observations)}."
            )
        # For so few numbers, lists are faster than arrays.
        reward = self._numbers(step.reward, "reward")
        done = self._numbers(step.done, "done")
        count = self._numbers(step.episode_step, "episode_step")
        total = self._numbers(step.episode_return, "episode_return")
        truncated = self._numbers(step.truncated, "truncated") if step.truncated else []
        _check_numbers(reward, "reward", MAX_NUMBER)
        _check_numbers(total, "episode_return", MAX_FLOAT32)
        if max(count) > MAX_INT32:
            raise invalid(f"episode_step must be at most {MAX_INT32}, got {max(count)}.")
        if self._is_first and not all(done):
            raise invalid("In the first Step of a stream every done must be true, got a false.")
        if any(t and not d for t, d in zip(truncated, done, strict=False)):
            raise invalid("A truncated environment must be done, too, got one that is not.")
        info = read_info(step.info, self._num_envs) if step.info else {}
        arrays = [array.read(leaf) for array, leaf in zip(self._arrays, observations, strict=True)]

        self.info = info
        for view, array in zip(self._leaves, arrays, strict=True):
            view[...] = array
        rows = self._rows
        rows["reward"][...] = reward
        rows["done"][...] = done
        rows["episode_step"][...] = count
        rows["episode_return"][...] = total
        rows["truncated"][...] = truncated or False
        self._is_first = False

    def _step_in(self, data: bytes) -> Any:
        if len(data) > self._max_bytes:
            raise invalid(
                f"A message of {self._num_envs} such environments may have {self._max_bytes} "
                f"bytes, got {len(data)}."
            )
        if len(data) > MAX_UNCOUNTED_BYTES:
            self._check_fields(data)
        message = parse(pb.EnvironmentMessage, data)
        check_no_failure(message)
        check_kind(message, "a Step", "step")
        return message.step

    def _check_fields(self, data: bytes) -> None:
        """Raise `Refused` for many small fields, which would take much memory once parsed."""
        fields = fields_in(data, 0, len(data), 1)
        if fields and fields[0][0] == _STEP:
            [(_, start, end)] = fields
            fields = fields_in(data, start, end, self._max_fields)
        extra = sum(end - start for tag, start, end in fields if tag != _TAGS["observation"])
        if extra > self._max_extra:
            raise invalid(
                f"A message of {self._num_envs} such environments may have {self._max_extra} bytes "
                f"besides observations, got {extra}."
            )

    def _numbers(self, values: Any, name: str) -> list[Any]:
        if len(values) != self._num_envs:
            raise invalid(
                f"A Step must have {self._num_envs} of {name}, one for each environment, "
                f"got {len(values)}."
            )
        return list(values)


def _check_numbers(values: list[float], name: str, most: float) -> None:
    # A float64 sum of float32 numbers cannot overflow: it is finite only if all of them are.
    if not math.isfinite(sum(values)) or max(values) > most or min(values) < -most:
        bad = next(value for value in values if not abs(value) <= most)
        raise invalid(f"Every {name} must be from {-most:g} to {most:g}, got {bad:g}.")


class ActionsReader:
    """Decodes and checks the actions of one stream."""

    def __init__(self, spec: Spec, num_envs: int) -> None:
        self._spec = spec.action
        self._arrays = [
            ArrayReader(leaf, num_envs, f"Action {i}", FINITE if "float" in leaf.dtype else None)
            for i, leaf in enumerate(nest.flatten(spec.action))
        ]
        num_bytes = sum(array.num_bytes for array in self._arrays)
        self._max_bytes = num_bytes + MAX_EXTRA_BYTES_EACH * (len(self._arrays) + 1)
        # The bytes that precede the array in a message with a single one, as usually encoded.
        tag = field_tag(_ACTION, num_bytes)
        self._head = field_tag(_ACTIONS, len(tag) + num_bytes) + tag
        self._single_bytes = -1
        if isinstance(spec.action, ArraySpec):
            self._single_bytes = len(self._head) + num_bytes

    def read(self, data: bytes) -> Any:
        """Return a nest of arrays [K, ...], which share memory with the message."""
        if len(data) == self._single_bytes and data.startswith(self._head):
            return self._arrays[0].read(data[len(self._head) :])
        if len(data) > self._max_bytes:
            raise invalid(f"Actions may have {self._max_bytes} bytes, got {len(data)}.")
        message = parse(pb.AgentMessage, data)
        leaves = message.actions.action
        if len(leaves) != len(self._arrays):
            check_kind(message, "Actions", "actions")
            raise invalid(f"Expected {len(self._arrays)} actions, got {len(leaves)}.")
        arrays = [reader.read(leaf) for reader, leaf in zip(self._arrays, leaves, strict=True)]
        return nest.pack_as(self._spec, arrays)
