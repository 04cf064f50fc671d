"""The handshake's messages (env.proto) to and from the wire, with every limit that they obey."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

import nest
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.specs import ArraySpec, Spec

VERSION = 1
LEARNER_METHOD = ("torchbeast.v1.Learner", "Play")
ENVIRONMENTS_METHOD = ("torchbeast.v1.Environments", "Play")

_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
DTYPES = frozenset(["bool", *_INTEGERS, "float16", "float32", "float64"])
MAX_HANDSHAKE_BYTES = 1 << 20
MAX_LEAVES = 256
MAX_NESTS = 1024
MAX_DEPTH = 16
MAX_DIMENSIONS = 8
MAX_NUM_ENVS = 1 << 16
MAX_NUM_ACTIONS = 1 << 16
MAX_NUM_STREAMS = 64  # that one server asks for
MAX_NAME = 200
MAX_TEXT = 10_000
MAX_STATUS_TEXT = 2_000  # a status travels as a header, and those are small


class Refused(Exception):
    """What the other end did cannot go on; `code` names a gRPC status, the text says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class EnvironmentFailed(Exception):
    """Something raised in the environments at the other end; here is what they say about it."""


@dataclass(frozen=True)
class Hello:
    """What environments say of themselves; see env.proto."""

    name: str
    num_envs: int
    spec: Spec
    num_actions: int = 0
    token: str = ""
    num_streams: int = 1


@dataclass(frozen=True)
class Greeting:
    """What a learner says of itself; see env.proto."""

    name: str
    token: str = ""
    knows_truncation: bool = True


def encode_hello(hello: Hello) -> bytes:
    message = pb.Hello(
        version=VERSION,
        name=hello.name[:MAX_NAME],
        token=hello.token,
        num_envs=hello.num_envs,
        observation=_nest_to_message(hello.spec.observation),
        action=_nest_to_message(hello.spec.action),
        num_actions=hello.num_actions,
        num_streams=hello.num_streams,
    )
    return pb.EnvironmentMessage(hello=message).SerializeToString()


def decode_hello(
    data: bytes,
    max_row_bytes: int = 1 << 40,
    check_token: Callable[[str], None] = lambda token: None,
) -> Hello:
    """Raises `Refused`.

    Whoever has no token gets nothing done here: `check_token` is called before anything else.
    """
    message = _parse_handshake(pb.EnvironmentMessage, data)
    kind = message.WhichOneof("message")
    if kind != "hello":
        raise invalid(f"The first message must be a Hello, got {kind or 'an empty one'}.")
    hello = message.hello
    check_token(hello.token)
    _check_version(hello.version)
    if not 1 <= hello.num_envs <= MAX_NUM_ENVS:
        raise invalid(f"num_envs must be from 1 to {MAX_NUM_ENVS}, got {hello.num_envs}.")
    if len(hello.name) > MAX_NAME:
        raise invalid(f"The name must have at most {MAX_NAME} characters, got {len(hello.name)}.")
    spec = Spec(
        _nest_from_message(hello.observation, "observation"),
        _nest_from_message(hello.action, "action"),
    )
    num_bytes = hello.num_envs * row_bytes(spec)
    if num_bytes > max_row_bytes:
        raise Refused(
            "RESOURCE_EXHAUSTED",
            f"The rows of one step may have {max_row_bytes} bytes, "
            f"{hello.num_envs} environments like these have {num_bytes}; put fewer in a stream.",
        )
    if hello.num_actions and spec.action != ArraySpec("int64"):
        raise invalid(
            f"With num_actions ({hello.num_actions}) the action must be int64[], "
            f"got {describe(spec.action)}."
        )
    if hello.num_actions > MAX_NUM_ACTIONS:
        raise invalid(f"num_actions must be at most {MAX_NUM_ACTIONS}, got {hello.num_actions}.")
    if hello.num_streams > MAX_NUM_STREAMS:
        raise invalid(f"num_streams must be at most {MAX_NUM_STREAMS}, got {hello.num_streams}.")
    return Hello(
        name=printable(hello.name),
        num_envs=hello.num_envs,
        spec=spec,
        num_actions=hello.num_actions,
        token=hello.token,
        num_streams=max(1, hello.num_streams),
    )


def decode_answer(data: bytes, max_row_bytes: int) -> Hello:
    """What environments that we dialled say first: `EnvironmentFailed` if they cannot be made."""
    message = _parse_handshake(pb.EnvironmentMessage, data)
    if message.WhichOneof("message") == "failure":
        raise EnvironmentFailed(message.failure.text[:MAX_TEXT])
    return decode_hello(data, max_row_bytes)


def encode_greeting(greeting: Greeting) -> bytes:
    message = pb.Greeting(
        version=VERSION,
        name=greeting.name,
        token=greeting.token,
        knows_truncation=greeting.knows_truncation,
    )
    return pb.AgentMessage(greeting=message).SerializeToString()


def decode_greeting(data: bytes) -> Greeting:
    message = _parse_handshake(pb.AgentMessage, data)
    kind = message.WhichOneof("message")
    if kind != "greeting":
        raise invalid(f"The first message must be a Greeting, got {kind or 'an empty one'}.")
    _check_version(message.greeting.version)
    greeting = message.greeting
    return Greeting(printable(greeting.name[:MAX_NAME]), greeting.token, greeting.knows_truncation)


def encode_failure(text: str) -> bytes:
    text = text[-MAX_TEXT:].encode(errors="replace").decode()  # a traceback's end says most
    return pb.EnvironmentMessage(failure=pb.Failure(text=text)).SerializeToString()


def _parse_handshake(message_class: Any, data: bytes) -> Any:
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise Refused(
            "RESOURCE_EXHAUSTED",
            f"The first message may have {MAX_HANDSHAKE_BYTES} bytes, got {len(data)}.",
        )
    return parse(message_class, data)


def parse(message_class: Any, data: bytes) -> Any:
    """Any bytes to a message, or `Refused`."""
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.name
        raise invalid(f"Expected an {name} of env.proto, got {len(data)} other bytes.") from error


def invalid(text: str) -> Refused:
    return Refused("INVALID_ARGUMENT", text)


def status_text(text: str) -> str:
    """Short enough for a status."""
    return text if len(text) <= MAX_STATUS_TEXT else "... " + text[-MAX_STATUS_TEXT:]


def printable(text: str) -> str:
    """Without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def describe(spec: Any) -> str:
    """A nest of specs, for people."""
    if isinstance(spec, ArraySpec):
        return str(spec)
    if isinstance(spec, dict):
        return "{" + ", ".join(f"{key!r}: {describe(spec[key])}" for key in sorted(spec)) + "}"
    return "(" + ", ".join(describe(item) for item in spec) + ")"


def canonical(spec: Any) -> Any:
    """The same for nests that correspond: sequences as tuples, dicts in the order of their keys."""
    if isinstance(spec, ArraySpec):
        return spec
    if isinstance(spec, dict):
        return {key: canonical(spec[key]) for key in sorted(spec)}
    return tuple(canonical(item) for item in spec)


def check_fit(
    expected: Spec | None, num_actions: int | None, got: Spec, got_num_actions: int
) -> None:
    """Raise `Refused` unless these environments are like those that the learner works with."""
    if expected is None:
        return
    for name in ("observation", "action"):
        ours, theirs = getattr(expected, name), getattr(got, name)
        if canonical(ours) != canonical(theirs):
            raise Refused(
                "FAILED_PRECONDITION",
                f"The learner works with {name}s {describe(ours)}, "
                f"these environments have {describe(theirs)}.",
            )
    if num_actions and got_num_actions and num_actions != got_num_actions:
        raise Refused(
            "FAILED_PRECONDITION",
            f"The learner works with {num_actions} actions, "
            f"these environments have {got_num_actions}.",
        )


def row_bytes(spec: Spec) -> int:
    """Bytes of one environment's row."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in nest.flatten(spec.row)
    )


def _check_version(version: int) -> None:
    if version != VERSION:
        raise Refused(
            "FAILED_PRECONDITION",
            f"This end speaks version {VERSION} of the protocol, the other version {version}; "
            "install the same version of torchbeast at both ends.",
        )


def _nest_to_message(spec: Any) -> pb.NestSpec:
    if isinstance(spec, ArraySpec):
        return pb.NestSpec(array=pb.ArraySpec(dtype=spec.dtype, shape=spec.shape))
    if isinstance(spec, dict):
        items = {key: _nest_to_message(value) for key, value in spec.items()}
        return pb.NestSpec(dict=pb.DictSpec(items=items))
    return pb.NestSpec(sequence=pb.SequenceSpec(items=[_nest_to_message(item) for item in spec]))


def _nest_from_message(message: pb.NestSpec, name: str) -> Any:
    num_nests = num_leaves = 0

    def convert(message: pb.NestSpec, depth: int) -> Any:
        nonlocal num_nests, num_leaves
        num_nests += 1
        if num_nests > MAX_NESTS:
            raise invalid(f"The spec of the {name} may have {MAX_NESTS} nests, got more.")
        kind = message.WhichOneof("kind")
        if kind is None:
            raise invalid(f"The spec of the {name} has a nest without a kind; see NestSpec.")
        if depth > MAX_DEPTH:
            raise invalid(f"The spec of the {name} may be nested {MAX_DEPTH} deep, got more.")
        if kind == "dict":
            return {key: convert(message.dict.items[key], depth + 1)
                    for key in sorted(message.dict.items)}  # fmt: skip
        if kind == "sequence":
            return tuple(convert(item, depth + 1) for item in message.sequence.items)
        num_leaves += 1
        if num_leaves > MAX_LEAVES:
            raise invalid(f"The spec of the {name} may have {MAX_LEAVES} arrays, got more.")
        return _array_from_message(message.array, name)

    spec = convert(message, 0)
    if num_leaves == 0:
        raise invalid(f"The {name} must have at least one array, got none.")
    return spec


def _array_from_message(array: pb.ArraySpec, name: str) -> ArraySpec:
    if array.dtype not in DTYPES:
        raise invalid(
            f"The dtype of the {name} must be one of {', '.join(sorted(DTYPES))}, "
            f"got {printable(array.dtype[:MAX_NAME])!r}."
        )
    if len(array.shape) > MAX_DIMENSIONS or 0 in array.shape:
        raise invalid(
            f"The shape of the {name} must have at most {MAX_DIMENSIONS} dimensions, none of them "
            f"0, got {list(array.shape)[: 2 * MAX_DIMENSIONS]}."
        )
    return ArraySpec(array.dtype, tuple(array.shape))
