"""Rollouts to and from the wire: actors encode them, gateways check them and write them to a lane.

Frames are most of the bytes. A frame that is a stack of pictures shares all but one of them with
the previous row's frame, and only that one is sent.
"""

import math
from typing import Any

import numpy as np

import nest
from libtorchbeast.env_host import ActionCheck, BadAnswer
from libtorchbeast.episode_info import MAX_NAMES, InfoSums
from libtorchbeast.observations import FLOATS, NumberRange
from libtorchbeast.rollout_layout import RolloutSpec
from libtorchbeast.rows import MAX_FLOAT32, NUMBERS, Row
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import invalid
from libtorchbeast.rpc.messages import parse
from libtorchbeast.rpc.wire import (
    LENGTH_DELIMITED,
    ArrayReader,
    as_sent,
    field_tag,
    fields_in,
    read_info,
)
from libtorchbeast.specs import ArraySpec

MIN_STACK_BYTES = 1024  # a smaller frame is always sent whole
MAX_ROLLOUT_EXTRA_BYTES = 1 << 16  # of a message, besides arrays
_FIELDS = pb.Rollout.DESCRIPTOR.fields_by_name
_ROLLOUT = pb.ActorMessage.ROLLOUT_FIELD_NUMBER << 3 | LENGTH_DELIMITED
FLOAT32 = NumberRange(-MAX_FLOAT32, MAX_FLOAT32)


def encode_rollout(
    rows: Row,
    output: dict[str, Any],
    state: tuple[np.ndarray, ...],
    version: int,
    info: InfoSums | None = None,
    num_unsent: int = 0,
) -> bytes:
    """Encode a rollout as an ActorMessage.

    Rows are [T+1, K, ...], outputs [T, K, ...], and the parts of the state [L, K, ...].
    """
    small = pb.Rollout(version=version, num_unsent=num_unsent)
    for name, (total, count) in (info or {}).items():
        small.info.add(name=name, total=total, count=count)
    head = small.SerializeToString()
    parts: list[Any] = [head]
    size = len(head)

    def add(name: str, arrays: list[np.ndarray]) -> None:
        nonlocal size
        arrays = [as_sent(array) for array in arrays]
        num_bytes = sum(array.nbytes for array in arrays)
        tag = field_tag(_FIELDS[name].number << 3 | LENGTH_DELIMITED, num_bytes)
        parts.extend([tag, *arrays])
        size += len(tag) + num_bytes

    for leaf in nest.flatten(rows["frame"]):
        arrays, stacked = _without_overlap(leaf)
        add("observation", arrays)
        add("stacked", stacked)
    for name in NUMBERS:
        add(name, [rows[name]])
    for leaf in nest.flatten(rows["last_action"]):
        add("last_action", [leaf])
    for leaf in nest.flatten(output["action"]):
        add("action", [leaf])
    for name in ("policy_logits", "baseline"):
        add(name, [output[name]])
    for part in state:
        add("state", [part])
    return b"".join([field_tag(_ROLLOUT, size), *parts])


def _without_overlap(frames: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the parts of frames [T+1, K, ...] that must be sent.

    If this is not all of them, also flags [T, K]: whether only a frame's last picture is sent.
    """
    depth = frames.shape[2] if frames.ndim > 2 else 0
    if depth < 2 or frames[0, 0].nbytes < MIN_STACK_BYTES:
        return [frames], []
    before, after = frames[:-1, :, 1:], frames[1:, :, :-1]
    stacked = (before == after).all(axis=tuple(range(2, frames.ndim)))  # [T, K]
    if not stacked.any():
        return [frames], []
    sent = [frames[0]]
    for row, is_stacked in zip(frames[1:], stacked, strict=True):
        if is_stacked.all():
            sent.append(row[:, -1])
        else:
            sent += [row[k, -1] if flag else row[k] for k, flag in enumerate(is_stacked)]
    return sent, [stacked]


def is_rollout(data: bytes) -> bool:
    """Whether an actor's message is a rollout, by its first byte; the message is not parsed."""
    return data[:1] == bytes([_ROLLOUT])


class RolloutReader:
    """Checks the rollouts of one stream, and writes them to a lane."""

    def __init__(self, spec: RolloutSpec, num_envs: int, views: Any) -> None:
        """`views` are the arrays of the lane, [K, ...] each."""
        self._num_envs = num_envs
        T = self._T = spec.unroll_length
        views = nest.map(lambda array: array.swapaxes(0, 1), views)  # [T+1, K, ...]
        self._rows, self._outputs, self._state = (views[k] for k in ("rows", "outputs", "state"))
        environment = spec.environment
        self._frames = nest.flatten(environment.observation)
        self._check_action = ActionCheck(environment.action)
        self._action = environment.action
        actions = nest.flatten(environment.action)
        logits = ArraySpec("float32", (spec.num_params,))

        def reader(
            leaf: ArraySpec, rows: int, name: str, range: NumberRange = FLOATS
        ) -> ArrayReader:
            leaf = ArraySpec(leaf.dtype, (num_envs, *leaf.shape))
            return ArrayReader(leaf, rows, name, range if "float" in leaf.dtype else None)

        ranges = {"episode_return": FLOAT32}
        self._numbers = {
            name: reader(ArraySpec(dtype), T + 1, name, ranges.get(name, FLOATS))
            for name, dtype in NUMBERS.items()
        }
        self._last_actions = [reader(leaf, T + 1, "last_action", FLOAT32) for leaf in actions]
        self._actions = [reader(leaf, T, "action", FLOAT32) for leaf in actions]
        self._logits = reader(logits, T, "policy_logits")
        self._baseline = reader(ArraySpec("float32"), T, "baseline", FLOAT32)
        # Each part of the state is [L, ...] in the spec, and [L, K, ...] in a rollout.
        self._states = [
            reader(ArraySpec(part.dtype, part.shape[1:]), part.shape[0], "state")
            for part in spec.state
        ]
        num_arrays = 2 * len(self._frames) + 2 * len(actions) + len(spec.state)
        self._max_fields = num_arrays + len(_FIELDS) + MAX_NAMES
        stacked_bytes = len(self._frames) * T * num_envs
        self._max_bytes = num_envs * spec.num_bytes + stacked_bytes + MAX_ROLLOUT_EXTRA_BYTES
        self._is_first = True
        self.info: InfoSums = {}
        """Figures of the episodes that ended in the last rollout read."""
        self.num_unsent = 0

    def read(self, data: bytes, newest: int) -> None:
        """Write the rollout in a message to the lane; raise `Refused` if it breaks a rule.

        `data` is not trusted. `newest` is the newest version that the learner has published.
        """
        rollout = self._rollout_in(data)
        if not 0 <= rollout.version <= newest:
            raise invalid(
                f"The version of a rollout must be from 0 to {newest}, which is the newest, got "
                f"{rollout.version}."
            )
        rows = {name: reader.read(getattr(rollout, name)) for name, reader in self._numbers.items()}
        self._check_rows(rows)
        last_actions = self._read_actions(rollout.last_action, self._last_actions)
        actions = self._read_actions(rollout.action, self._actions)
        logits = self._logits.read(rollout.policy_logits)
        baseline = self._baseline.read(rollout.baseline)
        states = [
            reader.read(part) for reader, part in self._pairs(self._states, rollout.state, "state")
        ]
        info = read_info(rollout.info, self._T * self._num_envs)
        self._read_frames(rollout)

        for name, array in rows.items():
            self._rows[name][...] = array
        nest.map_many2(np.copyto, self._rows["last_action"], last_actions)
        outputs = self._outputs
        for leaf in nest.flatten(outputs):
            leaf[0] = 0  # the output that led to row 0 is not in the rollout
        nest.map_many2(_copy_later, outputs["action"], actions)
        outputs["policy_logits"][1:] = logits
        outputs["baseline"][1:] = baseline
        outputs["version"][1:] = rollout.version
        for view, array in zip(self._state, states, strict=True):
            view[...] = array
        self._is_first = False
        self.info, self.num_unsent = info, rollout.num_unsent

    def _rollout_in(self, data: bytes) -> Any:
        if len(data) > self._max_bytes:
            raise invalid(
                f"A rollout of {self._num_envs} such environments may have {self._max_bytes} "
                f"bytes, got {len(data)}."
            )
        # Fields are counted before parsing: many small ones would take much memory once parsed.
        fields = fields_in(data, 0, len(data), 1)
        if fields and fields[0][0] == _ROLLOUT:
            fields_in(data, fields[0][1], fields[0][2], self._max_fields)
        return parse(pb.ActorMessage, data).rollout

    def _check_rows(self, rows: Row) -> None:
        if self._is_first and not rows["done"][0].all():
            raise invalid("In the first row of a stream every done must be true, got a false.")
        if (rows["truncated"] & ~rows["done"]).any():
            raise invalid("A truncated environment must be done, too, got one that is not.")
        if rows["episode_step"].min() < 0:
            least = rows["episode_step"].min()
            raise invalid(f"episode_step must not be negative, got {least}.")

    def _read_actions(self, leaves: Any, readers: list[ArrayReader]) -> Any:
        """Read and check actions: a nest of arrays [T, K, ...] or [T+1, K, ...]."""
        arrays = [reader.read(leaf) for reader, leaf in self._pairs(readers, leaves, "action")]
        actions = nest.pack_as(self._action, arrays)
        try:
            self._check_action(nest.map(lambda x: x.reshape(-1, *x.shape[2:]), actions))
        except BadAnswer as error:
            raise invalid(str(error)) from error
        return actions

    def _read_frames(self, rollout: Any) -> None:
        views = nest.flatten(self._rows["frame"])
        stacked = list(rollout.stacked) or [b""] * len(self._frames)
        self._pairs(self._frames, stacked, "stacked")
        pairs = self._pairs(self._frames, rollout.observation, "observation")
        for i, (spec, data) in enumerate(pairs):
            name, range = f"Observation {i}", NumberRange.of(spec)
            if not stacked[i]:
                leaf = ArraySpec(spec.dtype, (self._num_envs, *spec.shape))
                views[i][...] = ArrayReader(leaf, self._T + 1, name, range).read(data)
                continue
            flags = ArraySpec("bool", (self._num_envs,))
            is_stacked = ArrayReader(flags, self._T, f"stacked {i}", None).read(stacked[i])
            self._unstack(views[i], spec, data, is_stacked, name)
            if range is not None and not range.holds(views[i]):
                raise invalid(f"{range.complaint(name, views[i])}.")

    def _unstack(
        self, view: np.ndarray, spec: ArraySpec, data: bytes, is_stacked: np.ndarray, name: str
    ) -> None:
        """Write frames [T+1, K, ...] to `view`; of those in `is_stacked` only the end was sent.

        The rest of such a frame is the frame before it, without its first picture.
        """
        if not spec.shape:
            raise invalid(f"{name} is one number, and cannot be stacked.")
        whole, part = math.prod(spec.shape), math.prod(spec.shape[1:])
        num_parts = int(is_stacked.sum())
        total = whole * (view.shape[0] * self._num_envs - num_parts) + part * num_parts
        numbers = ArrayReader(ArraySpec(spec.dtype), total, name, None).read(data)
        start = 0

        def take(count: int, *shape: int) -> np.ndarray:
            nonlocal start
            start += count
            return numbers[start - count : start].reshape(shape)

        view[0] = take(self._num_envs * whole, self._num_envs, *spec.shape)
        for t, flags in enumerate(is_stacked, start=1):
            if flags.all():
                view[t, :, :-1] = view[t - 1, :, 1:]
                view[t, :, -1] = take(self._num_envs * part, self._num_envs, *spec.shape[1:])
                continue
            for k, flag in enumerate(flags):
                if flag:
                    view[t, k, :-1] = view[t - 1, k, 1:]
                    view[t, k, -1] = take(part, *spec.shape[1:])
                else:
                    view[t, k] = take(whole, *spec.shape)

    def _pairs(self, ours: list[Any], theirs: Any, name: str) -> list[tuple[Any, Any]]:
        """Pair readers or specs with the parts of a rollout; raise `Refused` if numbers differ."""
        if len(ours) != len(theirs):
            raise invalid(f"A rollout must have {len(ours)} of {name}, got {len(theirs)}.")
        return list(zip(ours, theirs, strict=True))


def _copy_later(view: np.ndarray, array: np.ndarray) -> None:
    """Copy `array` to all rows but the first; models may output any integer dtype."""
    np.copyto(view[1:], array, casting="unsafe")
