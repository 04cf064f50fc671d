"""Encodes and decodes the messages of actors that carry the model, except rollouts.

These are the handshake (ActorHello, Welcome), WeightsRequest, Weights and Taken of env.proto.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from libtorchbeast.rollout_layout import MODEL_FLAGS, ModelOffer
from libtorchbeast.rows import Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import (
    DTYPES,
    MAX_DIMENSIONS,
    MAX_NAME,
    Greeting,
    Hello,
    check_hello,
    invalid,
)
from libtorchbeast.rpc.messages import (
    array_to_message,
    check_first,
    check_kind,
    check_no_failure,
    failure_to_message,
    greeting_from_message,
    greeting_to_message,
    hello_from_message,
    hello_to_message,
    nest_to_message,
    parse,
    parse_handshake,
    spec_from_message,
)
from libtorchbeast.rpc.weights import BFLOAT16, WEIGHTS_DTYPES, Version, sent_dtype
from libtorchbeast.specs import ArraySpec
from libtorchbeast.text import printable

MAX_TENSORS = 1 << 14
MAX_WEIGHTS_BYTES = 1 << 34  # that an actor accepts from a learner
MAX_UNROLL_LENGTH = 1 << 16
MAX_WELCOME_BYTES = 1 << 22
MAX_ROLLOUTS_AHEAD = 64  # that an actor may have to hold in memory


@dataclass(frozen=True)
class Welcome:
    """The learner's answer to an actor's first message; see Welcome in env.proto."""

    greeting: Greeting
    spec: Spec
    model: dict[str, Any]
    """The model's `name`, and the values of MODEL_FLAGS."""
    unroll_length: int
    num_params: int
    state: tuple[ArraySpec, ...]
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """The name, the dtype on the wire and the shape of each tensor of the weights."""
    rollouts_ahead: int
    max_policy_lag: int | None

    @property
    def weights_bytes(self) -> int:
        """The size of one version of the weights on the wire."""
        return sum(size_of(dtype, shape) for _, dtype, shape in self.tensors)


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size in bytes of an array on the wire."""
    return math.prod(shape) * (2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize)


def encode_actor_hello(hello: Hello, weights_dtype: str) -> bytes:
    message = pb.ActorHello(hello=hello_to_message(hello), weights_dtype=weights_dtype)
    return pb.ActorMessage(hello=message).SerializeToString()


def decode_actor_hello(data: bytes, max_row_bytes: int) -> tuple[Hello, str]:
    """Return an actor's Hello and the dtype in which it wants weights.

    Raise `Refused` if the message breaks a rule.
    """
    message = parse_handshake(pb.ActorMessage, data)
    check_first(message, "an ActorHello", "hello")
    hello = hello_from_message(message.hello.hello, max_row_bytes, has_model=True)
    dtype = message.hello.weights_dtype or WEIGHTS_DTYPES[0]
    if dtype not in WEIGHTS_DTYPES:
        shown = printable(dtype[:MAX_NAME])
        raise invalid(f"weights_dtype must be one of {', '.join(WEIGHTS_DTYPES)}, got {shown!r}.")
    return hello, dtype


def encode_welcome(offer: ModelOffer, greeting: Greeting, weights_dtype: str) -> bytes:
    rollout = offer.rollout
    tensors = [
        pb.TensorSpec(name=t.name, dtype=sent_dtype(t, weights_dtype), shape=t.shape)
        for t in offer.tensors
    ]
    lag = offer.max_policy_lag
    message = pb.Welcome(
        greeting=greeting_to_message(greeting),
        observation=nest_to_message(rollout.environment.observation),
        action=nest_to_message(rollout.environment.action),
        model=pb.ModelSpec(**offer.model),
        unroll_length=rollout.unroll_length,
        num_params=rollout.num_params,
        state=[array_to_message(part) for part in rollout.state],
        tensors=tensors,
        rollouts_ahead=offer.rollouts_ahead,
        max_policy_lag=-1 if lag is None else lag,
    )
    return pb.LearnerMessage(welcome=message).SerializeToString()


def decode_welcome(data: bytes, hello: Hello) -> Welcome:
    """Decode a Welcome; raise `Refused` if it breaks a rule, as learners are not trusted either."""
    if len(data) > MAX_WELCOME_BYTES:
        raise invalid(f"A Welcome may have {MAX_WELCOME_BYTES} bytes, got {len(data)}.")
    message = parse(pb.LearnerMessage, data)
    check_first(message, "a Welcome", "welcome")
    welcome = message.welcome
    greeting = greeting_from_message(welcome.greeting)
    spec = spec_from_message(welcome)
    check_hello(Hello("learner", 1, spec), 0, MAX_WEIGHTS_BYTES)
    if not 1 <= welcome.unroll_length <= MAX_UNROLL_LENGTH or welcome.num_params < 1:
        raise invalid(
            f"unroll_length must be from 1 to {MAX_UNROLL_LENGTH} and num_params positive, got "
            f"{welcome.unroll_length} and {welcome.num_params}."
        )
    if welcome.rollouts_ahead > MAX_ROLLOUTS_AHEAD:
        raise invalid(
            f"rollouts_ahead must be at most {MAX_ROLLOUTS_AHEAD}, got {welcome.rollouts_ahead}."
        )
    lag = welcome.max_policy_lag
    flags = {name: bool(getattr(welcome.model, name)) for name in MODEL_FLAGS}
    return Welcome(
        greeting=greeting,
        spec=spec,
        model={"name": printable(welcome.model.name[:MAX_NAME]), **flags},
        unroll_length=welcome.unroll_length,
        num_params=welcome.num_params,
        state=tuple(ArraySpec(_checked(p.dtype), tuple(p.shape)) for p in welcome.state),
        tensors=_tensors_in(welcome),
        rollouts_ahead=welcome.rollouts_ahead,
        max_policy_lag=None if lag < 0 else lag,
    )


def _tensors_in(welcome: pb.Welcome) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Check the tensors of a message, and return them as `Welcome.tensors`."""
    if not 1 <= len(welcome.tensors) <= MAX_TENSORS:
        raise invalid(f"A model must have 1 to {MAX_TENSORS} tensors, got {len(welcome.tensors)}.")
    tensors = []
    total = 0
    for tensor in welcome.tensors:
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise invalid(f"A tensor may have {MAX_DIMENSIONS} dimensions, got more.")
        dtype = tensor.dtype if tensor.dtype == BFLOAT16 else _checked(tensor.dtype)
        tensors.append((printable(tensor.name[:MAX_NAME]), dtype, tuple(tensor.shape)))
        total += size_of(dtype, tuple(tensor.shape))
    if total > MAX_WEIGHTS_BYTES:
        raise invalid(f"Weights may have {MAX_WEIGHTS_BYTES} bytes, got {total}.")
    return tuple(tensors)


def _checked(dtype: str) -> str:
    """Return a dtype's name; raise `Refused` unless it is one of DTYPES."""
    if dtype not in DTYPES:
        raise invalid(
            f"A dtype must be one of {', '.join(sorted(DTYPES))}, got "
            f"{printable(dtype[:MAX_NAME])!r}."
        )
    return dtype


def decode_request(data: bytes) -> int:
    """Decode a WeightsRequest: return the version that the actor has.

    Raise `EnvironmentFailed` if the message is a Failure, and `Refused` if it is any other.
    """
    message = parse_handshake(pb.ActorMessage, data)
    check_no_failure(message)
    check_kind(message, "a Rollout or a request", "request")
    return message.request.have


def encode_request(have: int) -> bytes:
    return pb.ActorMessage(request=pb.WeightsRequest(have=have)).SerializeToString()


def encode_actor_failure(text: str) -> bytes:
    return pb.ActorMessage(failure=failure_to_message(text)).SerializeToString()


def encode_taken(newest: int) -> bytes:
    return pb.LearnerMessage(taken=pb.Taken(newest=newest)).SerializeToString()


def encode_weights(version: Version, offset: int, data: bytes, newest: int) -> bytes:
    piece = pb.Weights(
        version=version.number,
        num_bytes=len(version.data),
        offset=offset,
        data=data,
        checksum=version.checksum,
        newest=newest,
    )
    return pb.LearnerMessage(weights=piece).SerializeToString()


def decode_learner_message(data: bytes) -> pb.LearnerMessage:
    """Decode a message that is Weights or Taken; raise `Refused` if it is neither."""
    message = parse(pb.LearnerMessage, data)
    check_kind(message, "Weights or Taken", "weights", "taken")
    return message
