"""The protocol: what goes out comes in, and whatever else comes in is refused with a sentence."""

import ast
import contextlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nest
from libtorchbeast.rows import NUMBERS, EpisodeCounter, Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.handshake import (
    DTYPES,
    EnvironmentFailed,
    Greeting,
    Hello,
    Refused,
    check_fit,
    hello_from_json,
)
from libtorchbeast.rpc.messages import (
    decode_answer,
    decode_greeting,
    decode_hello,
    encode_failure,
    encode_greeting,
    encode_hello,
    token_in,
    token_metadata,
)
from libtorchbeast.rpc.step_messages import (
    _STEP,
    ActionsReader,
    StepReader,
    encode_actions,
    encode_step,
)
from libtorchbeast.rpc.wire import field_tag
from libtorchbeast.shared_lanes import Lane
from libtorchbeast.specs import INT64, ArraySpec, discrete

ROOT = Path(__file__).parent.parent
ACTION = ArraySpec("int64")
NESTED = Spec(
    {"image": ArraySpec("uint8", (2, 3)), "rest": (ArraySpec("float32"), ArraySpec("bool", (2,)))},
    ACTION,
)
NUM_ENVS = 2


def test_generated_files_are_those_of_the_protocol(tmp_path):
    """If not: make proto."""
    folder = Path("libtorchbeast", "rpc")
    (tmp_path / folder).mkdir(parents=True)
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--pyi_out={tmp_path}"]
    command += [f"-o{tmp_path / folder / 'env.binpb'}", f"{folder}/env.proto"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated, committed = tmp_path / folder, ROOT / folder
    assert (generated / "env.binpb").read_bytes() == (committed / "env.binpb").read_bytes()
    assert stub_fields(generated / "env_pb2.pyi") == stub_fields(committed / "env_pb2.pyi")


def stub_fields(path: Path) -> set[tuple[str, str]]:
    """Each class with each of its fields; how imports are written depends on protoc's version."""
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.ClassDef]
    assert classes
    return {
        (node.name, ast.unparse(field))
        for node in classes
        for field in node.body
        if type(field) is ast.AnnAssign
    }


def test_every_message_of_the_protocol_has_its_class():
    names = set(pb.DESCRIPTOR.message_types_by_name)
    assert names >= {"EnvironmentMessage", "AgentMessage", "Hello", "Step"}
    for name in names:
        assert getattr(pb, name)().DESCRIPTOR.full_name == f"torchbeast.v1.{name}"


specs = st.recursive(
    st.builds(
        ArraySpec,
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(1, 5), max_size=3).map(tuple),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=5), inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(specs, specs, st.integers(1, 99))
def test_a_hello_comes_in_as_it_went_out(observation, action, num_envs):
    hello = Hello("somebody", num_envs, Spec(observation, action))
    assert decode_hello(encode_hello(hello)) == hello


def test_bounds_and_categories_come_in_as_they_went_out():
    observation = {
        "board": ArraySpec("uint8", (2, 2), 0, 1),
        "joints": ArraySpec("float32", (2,), (-1.0, -math.inf), (1.0, math.inf)),
        "tile": ArraySpec("int64", (), 5, 7, categories=True),
    }
    action = ArraySpec("int64", (2,), 0, (1, 2), categories=True)
    hello = Hello("somebody", 1, Spec(observation, action))
    assert decode_hello(encode_hello(hello)) == hello
    assert hello_from_json(json.loads(json.dumps(hello.to_json())), 1000) == hello


def test_an_older_end_that_says_only_the_number_of_actions_is_understood():
    data = hello_with(num_actions=3)
    assert decode_hello(data).spec.action == discrete(3)
    plain = Hello("x", 1, Spec(NESTED.observation)).to_json()
    assert hello_from_json({**plain, "num_actions": 3}, 1000).spec.action == discrete(3)
    assert (
        pb.EnvironmentMessage.FromString(
            encode_hello(Hello("x", 1, Spec(NESTED.observation, discrete(3))))
        ).hello.num_actions
        == 3
    )  # for older learners


def test_environments_fit_by_their_arrays_and_numbers_of_categories():
    board = ArraySpec("uint8", (2, 2), 0, 1)
    check_fit(Spec(board, discrete(3)), Spec(ArraySpec("uint8", (2, 2)), discrete(3)))
    check_fit(Spec(board, discrete(3)), Spec(board, ACTION))  # nobody said how many
    with pytest.raises(Refused, match="works with 3 actions, these environments have 4"):
        check_fit(Spec(board, discrete(3)), Spec(board, discrete(4)))
    with pytest.raises(Refused, match="works with 16 observations, these environments have 64"):
        check_fit(Spec(discrete(16), ACTION), Spec(discrete(64), ACTION))


def test_a_greeting_comes_in_as_it_went_out():
    greeting = Greeting("learner", knows_truncation=False)
    assert decode_greeting(encode_greeting(greeting)) == greeting


def make_row(spec: Spec, num_envs: int, seed: int = 0) -> dict:
    random = np.random.default_rng(seed)

    def values(leaf: ArraySpec) -> np.ndarray:
        return random.integers(0, 2, (num_envs, *leaf.shape)).astype(leaf.dtype)

    return {
        "frame": nest.map(values, spec.observation),
        "reward": random.normal(size=num_envs).astype(np.float32),
        "done": np.ones(num_envs, np.bool_),
        "truncated": random.integers(0, 2, num_envs).astype(np.bool_),
        "episode_step": random.integers(0, 99_999, num_envs).astype(np.int32),
        "episode_return": random.normal(size=num_envs).astype(np.float32),
    }


def make_reader(spec: Spec = NESTED, num_envs: int = NUM_ENVS) -> tuple[Lane, StepReader]:
    lane = Lane.create(spec, num_envs)
    return lane, StepReader(spec, num_envs, lane.rows)


@settings(deadline=None, max_examples=50)
@given(specs, st.integers(1, 4), st.integers(0, 99))
def test_a_step_comes_in_as_it_went_out(observation, num_envs, seed):
    spec = Spec(observation, ACTION)
    lane, reader = make_reader(spec, num_envs)
    row = make_row(spec, num_envs, seed)
    data = encode_step(row)
    reader.read(data)
    frames = nest.flatten(lane.rows["frame"]), nest.flatten(row["frame"])
    for got, expected in zip(*frames, strict=True):
        np.testing.assert_array_equal(got, expected)
    for name in NUMBERS:
        np.testing.assert_array_equal(lane.rows[name], row[name])
    # Protobuf's own form of the same message, as any other language would send it.
    reader.read(pb.EnvironmentMessage.FromString(data).SerializeToString())
    np.testing.assert_array_equal(lane.rows["reward"], row["reward"])
    lane.release()


def test_actions_come_in_as_they_went_out():
    spec = Spec(ACTION, {"move": ArraySpec("int64"), "aim": ArraySpec("float32", (2,))})
    actions = {"move": np.arange(3), "aim": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    got = ActionsReader(spec, 3).read(encode_actions(actions))
    np.testing.assert_array_equal(got["move"], actions["move"])
    np.testing.assert_array_equal(got["aim"], actions["aim"])


def test_actions_are_written_as_protobuf_does_and_read_however_they_are_written():
    actions = np.arange(300)
    data = encode_actions(actions)
    assert (
        data == pb.AgentMessage(actions=pb.Actions(action=[actions.tobytes()])).SerializeToString()
    )
    in_two_parts = pb.AgentMessage(actions=pb.Actions()).SerializeToString() + data
    for written in (data, in_two_parts):
        np.testing.assert_array_equal(ActionsReader(Spec(INT64), 300).read(written), actions)


def hello_with(spec=NESTED, **changes) -> bytes:
    message = pb.EnvironmentMessage.FromString(encode_hello(Hello("x", 1, spec)))
    for name, value in changes.items():
        setattr(message.hello, name, value)
    return message.SerializeToString()


def hello_action(action, num_actions=0) -> bytes:
    return hello_with(num_actions=num_actions, spec=Spec(NESTED.observation, action))


def array(dtype, shape, **said) -> bytes:
    message = pb.EnvironmentMessage.FromString(encode_hello(Hello("x", 1, NESTED)))
    spec = pb.NestSpec(array=pb.ArraySpec(dtype=dtype, shape=shape, **said))
    message.hello.observation.CopyFrom(spec)
    return message.SerializeToString()


def wide(number) -> bytes:
    message = pb.EnvironmentMessage.FromString(encode_hello(Hello("x", 1, NESTED)))
    empty = pb.NestSpec(sequence=pb.SequenceSpec())
    wide = pb.NestSpec(sequence=pb.SequenceSpec(items=[empty] * number))
    message.hello.observation.CopyFrom(wide)
    return message.SerializeToString()


def deep(depth) -> bytes:
    message = pb.EnvironmentMessage.FromString(encode_hello(Hello("x", 1, NESTED)))
    spec = pb.NestSpec(array=pb.ArraySpec(dtype="bool"))
    for _ in range(depth):
        spec = pb.NestSpec(sequence=pb.SequenceSpec(items=[spec]))
    message.hello.observation.CopyFrom(spec)
    return message.SerializeToString()


def name_by_sentence(value: bytes | str) -> str:
    """Tests need the same names in each process; protobuf's bytes of a dict may differ."""
    return value if isinstance(value, str) else "bytes"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "must be a Hello, got an empty one"),
        (b"\xff\xff\xff", "Expected an EnvironmentMessage of env.proto, got 3 other bytes"),
        (encode_step(make_row(NESTED, 1)), "must be a Hello, got step"),
        (
            hello_with(version=1),
            "speaks version 2.2 of the protocol, the other version 1.2; update",
        ),
        (hello_with(num_envs=0), "num_envs must be from 1 to 65536, got 0"),
        (hello_with(num_envs=70_000), "num_envs must be from 1 to 65536, got 70000"),
        (hello_with(name="x" * 201), "at most 200 characters, got 201"),
        (array("complex64", [1]), "dtype of the observation must be one of .*, got 'complex64'"),
        (array("O", [1]), "dtype of the observation must be one of .*, got 'O'"),
        (array("uint8", [1] * 9), "at most 8 dimensions"),
        (array("uint8", [0]), "none of them 0, got \\[0\\]"),
        (array("uint8", [2**31, 2**31]), "rows of one step may have 1000 bytes, 1 environments"),
        (deep(17), "may be nested 16 deep"),
        (wide(1024), "may have 1024 nests, got more"),
        (hello_with(num_actions=2**32 - 1), "num_actions must be at most 65536, got 4294967295"),
        (array("uint8", [4], low=[0, 1]), "one for each of 4 elements, and no nan; got 2: "),
        (array("float32", [], high=[math.nan]), "no nan; got 1: \\[nan\\]"),
        (array("int64", [], categories=True), "Categories of the observation must be integers"),
        (array("int64", [], low=[0], high=[2**31], categories=True), "at most 2147483648 of them"),
        (array("int64", [], low=[3], high=[2], categories=True), "from low to high"),
        (array("float32", [], low=[0], high=[2], categories=True), "must be integers"),
        (hello_action(ArraySpec("int64", (), 1, 2, True)), "of the action must begin at 0"),
        (
            hello_action(discrete(2), 3),
            "the action must be int64\\[\\], got int64\\[\\] of 2 numbers",
        ),
        (encode_failure("it broke"), "must be a Hello, got failure"),
        (hello_with(num_streams=65), "num_streams must be from 1 to 64, got 65"),
        (bytes(2 << 20), "The first message may have 1048576 bytes, got 2097152"),
    ],
    ids=name_by_sentence,
)
def test_a_bad_hello_is_refused_with_a_sentence(data, sentence):
    with pytest.raises(Refused, match=sentence):
        decode_hello(data, max_row_bytes=1000)


def test_a_token_travels_with_the_call_and_in_no_message():
    assert token_in(token_metadata("a secret")) == "a secret"
    assert token_in((("user-agent", "x"), ("authorization", "bearer mine"))) == "mine"
    for metadata in (None, (), (("authorization", "Basic mine"),), (("x", "Bearer mine"),)):
        assert token_in(metadata) == ""
    assert token_metadata("") == ()
    assert b"secret" not in encode_hello(Hello("x", 1, NESTED, "secret"))
    assert b"secret" not in encode_greeting(Greeting("x", "secret"))


def test_unauthenticated_peers_cannot_say_that_something_failed():
    with pytest.raises(Refused, match="must be a Hello, got failure"):
        decode_hello(encode_failure("read me"))
    with pytest.raises(EnvironmentFailed, match="it broke"):
        decode_answer(encode_failure("it broke"), max_row_bytes=1000)


def test_a_failure_with_broken_characters_can_be_told():
    message = pb.EnvironmentMessage.FromString(encode_failure("r\udce9sum.py broke"))
    assert message.failure.text == "r?sum.py broke"


def test_numbers_need_not_be_packed():
    num_envs = 400
    lane, reader = make_reader(Spec(ArraySpec("uint8"), ACTION), num_envs)
    step = bytearray()
    for tag, value in ((0x15, b"\0\0\0\0"), (0x18, b"\1"), (0x28, b"\0"), (0x35, b"\0\0\x80?")):
        step += (bytes([tag]) + value) * num_envs
    step += b"\x0a" + bytes([num_envs & 127 | 128, num_envs >> 7]) + bytes(num_envs)
    reader.read(b"\x12" + bytes([len(step) & 127 | 128, len(step) >> 7]) + bytes(step))
    assert (lane.rows["episode_return"] == 1).all()
    lane.release()


@pytest.mark.parametrize("piece", [b"\x0a\0", b"\x18\1"], ids=["observations", "flags"])
def test_a_message_of_many_small_pieces_is_refused_before_it_is_read(piece):
    lane, reader = make_reader()
    data = pb.EnvironmentMessage(step=pb.Step.FromString(piece * 100_000)).SerializeToString()
    with pytest.raises(Refused, match=r"may have \d+ bytes, got"):
        reader.read(data)
    lane.release()


def step_with(**changes) -> bytes:
    message = pb.EnvironmentMessage.FromString(encode_step(make_row(NESTED, NUM_ENVS)))
    for name, values in changes.items():
        field = getattr(message.step, name)
        del field[:]
        field.extend(values)
    return message.SerializeToString()


IMAGE, NUMBER, FLAGS = bytes(12), bytes(8), bytes(4)
NAN = np.full(2, np.nan, np.float32).tobytes()
HUGE = np.full(2, -3e38, np.float32).tobytes()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "Expected a Step, got an empty message"),
        (encode_hello(Hello("x", 1, NESTED)), "Expected a Step, got hello"),
        (b"\xff\xff", "Expected an EnvironmentMessage"),
        (step_with(observation=[]), "must have 3 observations, got 0"),
        (step_with(observation=[IMAGE, NUMBER]), "must have 3 observations, got 2"),
        (
            step_with(observation=[IMAGE + b"x", NUMBER, FLAGS]),
            r"Observation 0 must have 12 bytes \(uint8\[2, 2, 3\]\), got 13",
        ),
        (step_with(observation=[IMAGE, NAN, FLAGS]), "Observation 1 must be from .*, got nan"),
        (step_with(observation=[IMAGE, HUGE, FLAGS]), r"must be from -1e\+09 to 1e\+09"),
        (step_with(observation=[IMAGE, NUMBER, b"\0\1\2\0"]), "Observation 2 is bool"),
        (step_with(reward=[1.0]), "must have 2 of reward, one for each environment, got 1"),
        (step_with(reward=[1.0, float("nan")]), r"Every reward must be from .*, got nan"),
        (step_with(reward=[1.0, -2e9]), r"reward must be from -1e\+09 to 1e\+09, got -2e\+09"),
        (step_with(episode_return=[1.0, float("inf")]), r"episode_return must be from .*, got inf"),
        (step_with(done=[True]), "must have 2 of done"),
        (step_with(done=[True, False]), "In the first Step of a stream every done must be true"),
        (step_with(episode_step=[0, 2**32 - 1]), "episode_step must be at most 2147483647"),
        (step_with(truncated=[True]), "must have 2 of truncated"),
    ],
    ids=name_by_sentence,
)
def test_a_bad_step_is_refused_with_a_sentence(data, sentence):
    lane, reader = make_reader()
    with pytest.raises(Refused, match=sentence):
        reader.read(data)
    lane.release()


def test_a_category_that_the_learner_does_not_know_is_refused():
    """Nor may numbers that a user's Embedding has no row for come from outside."""
    spec = Spec((discrete(3), ArraySpec("int32", (2,), (0, -1), (4, 2), True)), ACTION)
    lane, reader = make_reader(spec, num_envs=2)

    def step(kind, pair):
        frame = (np.array(kind, np.int64), np.array(pair, np.int32))
        return encode_step({**make_row(spec, 2), "frame": frame})

    reader.read(step([0, 2], [[0, -1], [4, 2]]))
    for kind, pair, sentence in (
        ([0, 3], [[0, 0], [0, 0]], "Observation 0 must be one of the categories 0 to 2, got 3."),
        ([0, -1], [[0, 0], [0, 0]], "Observation 0 must be one of the categories 0 to 2, got -1."),
        ([0, 0], [[0, 0], [0, -2]], "Observation 1 must be one of the categories -1 to 2, got -2."),
    ):
        with pytest.raises(Refused) as info:
            reader.read(step(kind, pair))
        assert (info.value.code, str(info.value)) == ("INVALID_ARGUMENT", sentence)
    lane.release()


def test_only_what_is_done_is_truncated():
    lane, reader = make_reader()
    reader.read(step_with())
    with pytest.raises(Refused, match="A truncated environment must be done, too"):
        reader.read(step_with(done=[True, False], truncated=[False, True]))
    lane.release()


def test_a_failure_arrives_with_its_text():
    lane, reader = make_reader()
    with pytest.raises(EnvironmentFailed, match="it broke"):
        reader.read(encode_failure("it broke"))
    lane.release()


@pytest.mark.parametrize("data", [b"", b"\xff", encode_actions(np.zeros(3, np.int64))])
def test_bad_actions_are_refused(data):
    with pytest.raises(Refused, match=r"Expected|must have"):
        ActionsReader(NESTED, 2).read(data)


def test_specs_fit_if_their_nests_correspond():
    number, other = ArraySpec("int64"), ArraySpec("int32")
    check_fit(Spec([number], number), Spec((number,), number))
    check_fit(None, NESTED)
    with pytest.raises(Refused, match=r"works with actions int64\[\], .* have int32\[\]"):
        check_fit(Spec(number, number), Spec(number, other))


# A fuzzer: 100,000 messages that were right until something happened to them.

NUM_MUTANTS = 100_000


def mutate(data: bytes, random: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        position = random.randrange(len(mutant) + 1)
        kind = random.randrange(5)
        if kind == 0:
            mutant[position : position + 1] = bytes([random.randrange(256)])
        elif kind == 1:
            mutant[position:position] = random.randbytes(random.randrange(1, 12))
        elif kind == 2:
            del mutant[position : position + random.randrange(1, 20)]
        elif kind == 3:
            del mutant[position:]
        elif mutant:
            mutant[position : position + 1] = bytes([1 << random.randrange(8)])
    return bytes(mutant)


def test_a_hundred_thousand_malformed_messages_do_no_harm():
    random_ = random.Random(1)
    lane, reader = make_reader()
    good = encode_step(make_row(NESTED, NUM_ENVS))
    hello = encode_hello(Hello("x", 3, NESTED, "token"))
    before = bytes(lane._memory)
    outcomes = {"read": 0, "refused": 0}
    for number in range(NUM_MUTANTS):
        data = mutate(hello if number % 4 == 0 else good, random_)
        try:
            if number % 4 == 0:
                decode_hello(data, max_row_bytes=1 << 20)
            else:
                reader.read(data)
            outcomes["read"] += 1
        except (Refused, EnvironmentFailed):
            outcomes["refused"] += 1
    assert outcomes["refused"] > NUM_MUTANTS / 2
    # Nothing but the rows was written: neither the turn nor the actions.
    assert bytes(lane._memory[:128]) == before[:128]
    np.testing.assert_array_equal(lane.actions, 0)
    assert np.isfinite(lane.rows["reward"]).all()
    assert (lane._memory.view(np.uint8)[lane._next_byte :] == 0).all()
    lane.release()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    lane, reader = make_reader()
    for read in (reader.read, decode_hello, decode_greeting, ActionsReader(NESTED, 2).read):
        with contextlib.suppress(Refused, EnvironmentFailed):
            read(data)
    lane.release()


LARGE = Spec(ArraySpec("float32", (1 << 20,)), INT64)


def test_many_small_fields_are_refused_before_they_take_memory():
    _, reader = make_reader(LARGE, 1)
    info = bytes([pb.Step.INFO_FIELD_NUMBER << 3 | 2, 0])
    step = info * (1 << 21)
    for data in (field_tag(_STEP, len(step)) + step, (field_tag(_STEP, 4) + 2 * info) * (1 << 19)):
        with pytest.raises(Refused, match="fields here, got more"):
            reader.read(data)


def test_many_numbers_are_refused_before_they_take_memory():
    _, reader = make_reader(LARGE, 1)
    counts = pb.Step(episode_step=[1] * (1 << 21))
    data = pb.EnvironmentMessage(step=counts).SerializeToString()
    with pytest.raises(Refused, match="bytes besides observations, got"):
        reader.read(data)


def test_a_large_step_is_read():
    lane, reader = make_reader(LARGE, 1)
    frame = np.arange(1 << 20, dtype=np.float32)[None]
    reader.read(encode_step(EpisodeCounter(1).first_row(frame)))
    assert (lane.rows["frame"] == frame).all()


def test_actions_of_more_bytes_than_they_can_have_are_refused():
    data = pb.AgentMessage(actions=pb.Actions(action=[b""] * 1000)).SerializeToString()
    with pytest.raises(Refused, match="Actions may have"):
        ActionsReader(Spec(INT64, INT64), 2).read(data)
