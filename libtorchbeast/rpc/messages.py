"""Converts the handshake (handshake.py) to and from protobuf messages of env.proto."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from libtorchbeast.rows import Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import (
    MAX_DEPTH,
    MAX_NAME,
    MAX_TEXT,
    VERSION,
    EnvironmentFailed,
    Greeting,
    Hello,
    Refused,
    check_hello,
    check_version,
    invalid,
    retry_in,
)
from libtorchbeast.specs import ArraySpec, Bound
from libtorchbeast.text import encodable, printable

LEARNER_METHOD = ("torchbeast.v1.Learner", "Play")
ACTOR_METHOD = ("torchbeast.v1.Learner", "Act")
ENVIRONMENTS_METHOD = ("torchbeast.v1.Environments", "Play")
TOKEN_KEY, TOKEN_SCHEME = "authorization", "Bearer"
RETRY_KEY = "retry-after-ms"
MAX_HANDSHAKE_BYTES = 1 << 20
MAX_NESTS = 1024


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call, with the token if there is one."""
    return ((TOKEN_KEY, f"{TOKEN_SCHEME} {token}"),) if token else ()


def token_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the token in a call's metadata, or "" if there is none."""
    for key, value in metadata or ():
        scheme, _, token = str(value).partition(" ")
        if key == TOKEN_KEY and scheme.lower() == TOKEN_SCHEME.lower():
            return token
    return ""


def retry_metadata(refused: Refused) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata of a refusal, which may say when to dial again."""
    return () if refused.retry_s is None else ((RETRY_KEY, str(round(1000 * refused.retry_s))),)


def retry_s_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> float | None:
    """Return after how many seconds to dial again, if a refusal's metadata says so, or None."""
    values = [str(value) for key, value in metadata or () if key == RETRY_KEY]
    return retry_in(f"{values[0]}e-3") if values else None


def encode_hello(hello: Hello) -> bytes:
    return pb.EnvironmentMessage(hello=hello_to_message(hello)).SerializeToString()


def hello_to_message(hello: Hello) -> pb.Hello:
    return pb.Hello(
        version=VERSION,
        name=hello.name[:MAX_NAME],
        num_envs=hello.num_envs,
        observation=nest_to_message(hello.spec.observation),
        action=nest_to_message(hello.spec.action),
        num_actions=hello.spec.num_actions,
        num_streams=hello.num_streams,
        minor=hello.minor,
    )


def decode_hello(data: bytes, max_row_bytes: int = 1 << 40) -> Hello:
    """Decode and check a Hello; raise `Refused` if it breaks a rule."""
    message = parse_handshake(pb.EnvironmentMessage, data)
    check_first(message, "a Hello", "hello")
    return hello_from_message(message.hello, max_row_bytes)


def hello_from_message(hello: pb.Hello, max_row_bytes: int, has_model: bool = False) -> Hello:
    """Convert and check a Hello; raise `Refused` if it breaks a rule."""
    check_version(hello.version, hello.minor)
    spec = spec_from_message(hello)
    return check_hello(
        Hello(
            name=hello.name,
            num_envs=hello.num_envs,
            spec=spec,
            num_streams=max(1, hello.num_streams),
            minor=hello.minor,
            has_model=has_model,
        ),
        hello.num_actions,
        max_row_bytes,
    )


def decode_answer(data: bytes, max_row_bytes: int) -> Hello:
    """Decode the first message of environments that this end dialled, a Hello.

    Raise `EnvironmentFailed` if they could not be made, `Refused` if the message breaks a rule.
    """
    check_no_failure(parse_handshake(pb.EnvironmentMessage, data))
    return decode_hello(data, max_row_bytes)


def encode_greeting(greeting: Greeting) -> bytes:
    return pb.AgentMessage(greeting=greeting_to_message(greeting)).SerializeToString()


def greeting_to_message(greeting: Greeting) -> pb.Greeting:
    return pb.Greeting(
        version=VERSION,
        name=greeting.name,
        knows_truncation=greeting.knows_truncation,
        minor=greeting.minor,
    )


def decode_greeting(data: bytes) -> Greeting:
    message = parse_handshake(pb.AgentMessage, data)
    check_first(message, "a Greeting", "greeting")
    return greeting_from_message(message.greeting)


def greeting_from_message(greeting: pb.Greeting) -> Greeting:
    check_version(greeting.version, greeting.minor)
    name = printable(greeting.name[:MAX_NAME])
    return Greeting(name, knows_truncation=greeting.knows_truncation, minor=greeting.minor)


def encode_failure(text: str) -> bytes:
    return pb.EnvironmentMessage(failure=failure_to_message(text)).SerializeToString()


def failure_to_message(text: str) -> pb.Failure:
    return pb.Failure(text=encodable(text[-MAX_TEXT:]))  # the end of a traceback matters most


def parse_handshake(message_class: Any, data: bytes) -> Any:
    """Parse a message of the handshake; raise `Refused` if it is too large or invalid."""
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise Refused(
            "RESOURCE_EXHAUSTED",
            f"The first message may have {MAX_HANDSHAKE_BYTES} bytes, got {len(data)}.",
        )
    return parse(message_class, data)


def parse(message_class: Any, data: bytes) -> Any:
    """Parse bytes as a message of this class; raise `Refused` if that fails."""
    try:
        return message_class.FromString(data)
    except DecodeError as error:
        name = message_class.DESCRIPTOR.name
        raise invalid(f"Expected an {name} of env.proto, got {len(data)} other bytes.") from error


def check_first(message: Any, expected: str, kind: str) -> None:
    """Raise `Refused` unless a stream's first message is of this kind.

    The text of the refusal names the kind as `expected`.
    """
    got = message.WhichOneof("message")
    if got != kind:
        raise invalid(f"The first message must be {expected}, got {got or 'an empty one'}.")


def check_kind(message: Any, expected: str, *kinds: str) -> None:
    """Raise `Refused` unless a later message of a stream is of one of these kinds."""
    got = message.WhichOneof("message")
    if got not in kinds:
        raise invalid(f"Expected {expected}, got {got or 'an empty message'}.")


def check_no_failure(message: Any) -> None:
    """Raise `EnvironmentFailed`, with the message's text, if it is a Failure."""
    if message.WhichOneof("message") == "failure":
        raise EnvironmentFailed(message.failure.text[:MAX_TEXT])


def spec_from_message(message: Any) -> Spec:
    """Return the spec in a Hello or a Welcome."""
    return Spec(
        _nest_from_message(message.observation, "observation"),
        _nest_from_message(message.action, "action"),
    )


def array_to_message(spec: ArraySpec) -> pb.ArraySpec:
    return pb.ArraySpec(
        dtype=spec.dtype,
        shape=spec.shape,
        low=_numbers(spec.low),
        high=_numbers(spec.high),
        categories=spec.categories,
    )


def nest_to_message(spec: Any) -> pb.NestSpec:
    if isinstance(spec, ArraySpec):
        return pb.NestSpec(array=array_to_message(spec))
    if isinstance(spec, dict):
        items = {key: nest_to_message(value) for key, value in spec.items()}
        return pb.NestSpec(dict=pb.DictSpec(items=items))
    return pb.NestSpec(sequence=pb.SequenceSpec(items=[nest_to_message(item) for item in spec]))


def _nest_from_message(message: pb.NestSpec, name: str) -> Any:
    num_nests = 0

    def convert(message: pb.NestSpec, depth: int) -> Any:
        nonlocal num_nests
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
        array = message.array
        low, high = _bound(array.low), _bound(array.high)
        return ArraySpec(array.dtype, tuple(array.shape), low, high, array.categories)

    return convert(message, 0)


def _numbers(bound: Bound) -> tuple[float, ...]:
    return () if bound is None else bound if isinstance(bound, tuple) else (bound,)


def _bound(numbers: Any) -> Bound:
    return None if not numbers else numbers[0] if len(numbers) == 1 else tuple(numbers)
