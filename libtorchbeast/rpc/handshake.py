"""The handshake: how environments and a learner introduce themselves, and the checks of both.

It is the same over gRPC (messages.py converts it to bytes) and over unix sockets of this machine
(as JSON, converted here). Protobuf is not imported.
"""

import hmac
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from libtorchbeast.rows import Spec
from libtorchbeast.specs import (
    INT64,
    MAX_CATEGORIES,
    MAX_OBSERVED_CATEGORIES,
    ArraySpec,
    canonical,
    describe,
    discrete,
    has_offsets,
)
from libtorchbeast.text import printable
from libtorchbeast.tree import leaves_of

VERSION = 2
# A minor version adds only what an older end may ignore, as machines are not all updated at once.
# A learner accepts all older ones, and the next one. 1: a refusal may say when to dial again.
# 2: actors that carry the model.
MINOR = 2
MAX_RETRY_S = 60.0
_INTEGERS = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
DTYPES = frozenset(["bool", *_INTEGERS, "float16", "float32", "float64"])
MAX_LEAVES = 256
MAX_DEPTH = 16
MAX_SPEC_BYTES = 1 << 16
MAX_DIMENSIONS = 8
MAX_NUM_ENVS = 1 << 16
MAX_INTEGER = 2.0**53
MAX_NUM_STREAMS = 64  # that one server may ask for
MAX_NAME = 200
MAX_TEXT = 10_000
FINISHED = "OUT_OF_RANGE"  # the code of a learner that has finished training
MAX_STATUS_TEXT = 2_000  # a status is sent as a header, and the size of headers is limited


class Refused(Exception):
    """The other end is refused: `code` names a gRPC status, and the text says why."""

    # With these codes, something must be corrected before it makes sense to dial again.
    PERMANENT = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAUTHENTICATED", "UNIMPLEMENTED")

    def __init__(self, code: str, text: str, retry_s: float | None = None) -> None:
        """`retry_s`: after how long the other end should dial again, if not by its back-off."""
        super().__init__(text)
        self.code = code
        self.retry_s = retry_s

    def to_json(self) -> dict[str, Any]:
        """Return the refusal as values of a message, which `refusal_from_json` reads."""
        retry = {} if self.retry_s is None else {"retry_s": self.retry_s}
        return {"code": self.code, "text": str(self), **retry}


class EnvironmentFailed(Exception):
    """Environments at the other end raised an exception; the text is their report of it."""


@dataclass(frozen=True)
class Hello:
    """How environments introduce themselves; see Hello in env.proto."""

    name: str
    num_envs: int
    spec: Spec
    token: str = ""
    num_streams: int = 1
    minor: int = MINOR
    has_model: bool = False
    """Whether this is an actor that carries the model, and so sends whole rollouts."""
    knows_marks: bool = True
    """Whether the host of a lane knows that rows may be marked as taken (cpp/turn.h)."""

    def to_json(self) -> dict[str, Any]:
        spec = {"spec": self.spec.to_json(), "num_actions": self.spec.num_actions}
        return {**asdict(self), **spec, "version": VERSION}


@dataclass(frozen=True)
class Greeting:
    """How a learner introduces itself; see Greeting in env.proto."""

    name: str
    token: str = ""
    knows_truncation: bool = True
    minor: int = MINOR

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "version": VERSION}

    def to(self, hello: Hello) -> "Greeting":
        """Return the Greeting for environments that may be older than this end.

        They accept a minor version that is newer than their own by one at most.
        """
        return replace(self, minor=min(self.minor, hello.minor + 1))


def hello_from_json(
    values: dict[str, Any],
    max_row_bytes: int,
    check_token: Callable[[str], None] = lambda token: None,
) -> Hello:
    """Read and check a Hello, its token first; raise `Refused` if it breaks a rule."""
    try:
        check_token(str(values["token"]))
        minor = int(values.get("minor", 0))
        check_version(int(values["version"]), minor)
        hello = Hello(
            name=str(values["name"]),
            num_envs=int(values["num_envs"]),
            spec=Spec.from_json(values["spec"]),
            token=str(values["token"]),
            num_streams=int(values["num_streams"]),
            minor=minor,
            knows_marks=bool(values.get("knows_marks")),
        )
        num_actions = int(values["num_actions"])
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as e:
        raise invalid(f"That is no Hello: {str(e)[:MAX_NAME]!r}.") from e
    return check_hello(hello, num_actions, max_row_bytes)


def greeting_from_json(values: dict[str, Any]) -> Greeting:
    """Read and check a Greeting; raise `Refused` if it breaks a rule."""
    try:
        check_version(int(values["version"]), int(values.get("minor", 0)))
        return Greeting(
            printable(str(values["name"])[:MAX_NAME]),
            str(values["token"]),
            bool(values["knows_truncation"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(f"That is no Greeting: {error!r}.") from error


def refusal_from_json(message: dict[str, Any]) -> Refused:
    """Read the refusal that the other end has sent."""
    text = printable(str(message.get("text"))[:MAX_STATUS_TEXT])
    code = printable(str(message.get("code"))[:MAX_NAME])
    return Refused(code, text, retry_in(message.get("retry_s")))


def retry_in(seconds: Any) -> float | None:
    """Return after how many seconds the other end wants to be dialled again, within bounds.

    None if it gave no valid number.
    """
    try:
        return min(max(0.0, float(seconds)), MAX_RETRY_S)
    except (TypeError, ValueError):
        return None


def check_hello(hello: Hello, num_actions: int, max_row_bytes: int) -> Hello:
    """Check a Hello; return it with a printable name, or raise `Refused` if it breaks a rule.

    `num_actions` is added to an action's spec that lacks it; 0 if it is not known.
    """
    for what, number, most in (
        ("num_envs", hello.num_envs, MAX_NUM_ENVS),
        ("num_streams", hello.num_streams, MAX_NUM_STREAMS),
    ):
        if not 1 <= number <= most:
            raise invalid(f"{what} must be from 1 to {most}, got {number}.")
    if len(hello.name) > MAX_NAME:
        raise invalid(f"The name must have at most {MAX_NAME} characters, got {len(hello.name)}.")
    _check_spec(hello.spec.observation, "observation")
    _check_spec(hello.spec.action, "action")
    if has_offsets(hello.spec.action):
        raise invalid("Categories of the action must begin at 0; add your own first one to them.")
    num_bytes = hello.num_envs * hello.spec.row_bytes
    if num_bytes > max_row_bytes:
        raise Refused(
            "RESOURCE_EXHAUSTED",
            f"The rows of one step may have {max_row_bytes} bytes, "
            f"{hello.num_envs} environments like these have {num_bytes}; put fewer in a stream.",
        )
    spec = _with_num_actions(hello.spec, num_actions)
    return replace(hello, name=printable(hello.name), spec=spec)


def _with_num_actions(spec: Spec, num_actions: int) -> Spec:
    if not 0 <= num_actions <= MAX_CATEGORIES:
        raise invalid(f"num_actions must be at most {MAX_CATEGORIES}, got {num_actions}.")
    if num_actions in (0, spec.num_actions):
        return spec
    if spec.num_actions or canonical(spec.action) != INT64:
        of = f" of {spec.num_actions} numbers" if spec.num_actions else ""
        raise invalid(
            f"With num_actions ({num_actions}) the action must be int64[], "
            f"got {describe(spec.action)}{of}."
        )
    return replace(spec, action=discrete(num_actions))


def _check_spec(spec: Any, name: str) -> None:
    if _depth(spec) > MAX_DEPTH:
        raise invalid(f"The spec of the {name} may be nested {MAX_DEPTH} deep, got more.")
    num_bytes = len(json.dumps(Spec(spec).to_json()))
    if num_bytes > MAX_SPEC_BYTES:
        raise invalid(
            f"The spec of the {name} may have {MAX_SPEC_BYTES} bytes, got {num_bytes}; use fewer "
            "elements, or the same bounds for all of them."
        )
    leaves = [leaf for _, leaf in leaves_of(spec)]
    if not leaves:
        raise invalid(f"The {name} must have at least one array, got none.")
    if len(leaves) > MAX_LEAVES:
        raise invalid(f"The spec of the {name} may have {MAX_LEAVES} arrays, got {len(leaves)}.")
    for leaf in leaves:
        _check_array(leaf, name)


def _depth(spec: Any) -> int:
    if isinstance(spec, ArraySpec):
        return 0
    parts = spec.values() if isinstance(spec, dict) else spec
    return 1 + max((_depth(part) for part in parts), default=0)


def _check_array(array: ArraySpec, name: str) -> None:
    if array.dtype not in DTYPES:
        raise invalid(
            f"The dtype of the {name} must be one of {', '.join(sorted(DTYPES))}, "
            f"got {printable(array.dtype[:MAX_NAME])!r}."
        )
    if len(array.shape) > MAX_DIMENSIONS or any(n < 1 for n in array.shape):
        raise invalid(
            f"The shape of the {name} must have at most {MAX_DIMENSIONS} dimensions, none of them "
            f"0, got {list(array.shape)[: 2 * MAX_DIMENSIONS]}."
        )
    size = math.prod(array.shape)
    for bound in (array.low, array.high):
        numbers = bound if isinstance(bound, tuple) else (bound or 0,)
        if any(number != number for number in numbers) or len(numbers) not in (1, size):
            raise invalid(
                f"low and high of the {name} must be one number, or one for each of {size} "
                f"elements, and no nan; got {len(numbers)}: {list(numbers)[:MAX_DIMENSIONS]}."
            )
    most = MAX_CATEGORIES if name == "action" else MAX_OBSERVED_CATEGORIES
    if array.categories and not _has_categories(array, most):
        raise invalid(
            f"Categories of the {name} must be integers from low to high, at most "
            f"{most} of them, got {array} from {array.low} to {array.high}."[:MAX_TEXT]
        )


def _has_categories(array: ArraySpec, most: int) -> bool:
    if array.dtype not in _INTEGERS or math.prod(array.shape) > MAX_CATEGORIES:
        return False
    low, high = array.bounds
    if not (np.abs(low) < MAX_INTEGER).all() or not (np.abs(high) < MAX_INTEGER).all():
        return False
    is_whole = (low % 1 == 0) & (high % 1 == 0)
    return bool((is_whole & (low <= high) & (high - low < most)).all())


def check_version(version: int, minor: int) -> None:
    """Raise `Refused` if the other end's version of the protocol does not fit this end's."""
    if version != VERSION or minor > MINOR + 1:
        raise Refused(
            "FAILED_PRECONDITION",
            f"This end speaks version {VERSION}.{MINOR} of the protocol, the other version "
            f"{version}.{minor}; "
            "update the older one: the same version of torchbeast at both ends, and in a client of "
            "your own what env.proto says.",
        )


def check_token(expected: str, given: str) -> None:
    """Raise `Refused` if `expected` is a token and `given` another; compare in constant time."""
    if expected and not hmac.compare_digest(*map(_token_bytes, (expected, given))):
        what = "another one" if given else "none"
        raise Refused(
            "UNAUTHENTICATED",
            f"The token must be this end's, got {what}; give both ends the same --token_file.",
        )


def _token_bytes(token: str) -> bytes:
    return token.encode(errors="surrogatepass")  # JSON may contain unpaired surrogates


def check_fit(expected: Spec | None, got: Spec) -> None:
    """Raise `Refused` unless environments have the spec that the learner expects (None: any).

    Bounds may differ. Numbers of actions, or of other categories, may not if both are known.
    """
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
        pairs = zip(leaves_of(ours), leaves_of(theirs), strict=True)
        for (_, our), (_, their) in pairs:
            known = our.num_categories, their.num_categories
            if all(known) and known[0] != known[1]:
                our_number, their_number = (_in_words(numbers) for numbers in known)
                raise Refused(
                    "FAILED_PRECONDITION",
                    f"The learner works with {our_number} {name}s, "
                    f"these environments have {their_number}.",
                )


def _in_words(numbers: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in numbers[:MAX_DIMENSIONS])


def learner_is_ending(finished: bool = False, retry_s: float | None = None) -> Refused:
    """Return the refusal for clients of a learner that ends, or has `finished` training."""
    if finished:
        return Refused(FINISHED, "Training is finished.")
    return Refused("UNAVAILABLE", "The learner is ending; try again later.", retry_s)


def no_descriptor_left(who: str = "gateway") -> Refused:
    """Return the refusal of a lane for want of a file descriptor."""
    return Refused("RESOURCE_EXHAUSTED", f"The {who} has no descriptor left; wait.")


def invalid(text: str) -> Refused:
    """Return the refusal of a message that breaks a rule."""
    return Refused("INVALID_ARGUMENT", text)


def status_text(text: str) -> str:
    """Return a text that is short enough for a status: the end of a longer one."""
    return text if len(text) <= MAX_STATUS_TEXT else "... " + text[-MAX_STATUS_TEXT:]
