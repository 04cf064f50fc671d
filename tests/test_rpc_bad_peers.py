"""Bad peers: a status and a sentence each, and whoever plays beside them does not notice."""

import contextlib
import queue
import random
import selectors
import socket
import threading

import grpc
import numpy as np
import pytest

from libtorchbeast.rows import EpisodeCounter, Spec
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.gateway_listener import MAX_UNAUTHENTICATED_TEXTS
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    LEARNER_METHOD,
    encode_failure,
    encode_hello,
    token_metadata,
)
from libtorchbeast.rpc.step_messages import encode_step
from libtorchbeast.specs import ArraySpec
from tests.helpers.attacks import send_path, silent_streams, under_attack
from tests.helpers.counting import counting_group
from tests.helpers.remote import client, learner
from tests.helpers.threads import run_in_threads, wait_until
from tests.test_rpc_messages import mutate

pytestmark = [
    pytest.mark.xdist_group("bad_peers"),  # one learner for most of them
    pytest.mark.timeout(400),
]

SPEC = Spec(ArraySpec("float32", (3,)), ArraySpec("int64"))
HELLO = encode_hello(Hello("peer", 1, SPEC))
FRAME = np.zeros(3, np.float32)
NO = np.zeros(1, bool)


def first_row():
    return EpisodeCounter(1).first_row(FRAME[None])


def later_row():
    return EpisodeCounter(1).row(FRAME[None], np.ones(1), NO, NO, np.zeros(1))


FIRST, LATER = encode_step(first_row()), encode_step(later_row())
LIMITS = Limits(
    max_message_bytes=1 << 20,
    connections_at_once=100_000,
    connections_per_s=1e6,
    handshake_s=3.0,
    write_s=3.0,
    step_s=3.0,
    keepalive_s=1.0,
)
NUM_STREAMS = 2_000


@pytest.fixture(scope="module")
def one_for_all():
    with under_attack(limits=LIMITS, one_stream=False) as it:
        yield it


@pytest.fixture
def it(one_for_all):
    """A learner with a client that goes on after each of these tests, and is checked at the end."""
    yield one_for_all
    one_for_all.bystander.plays_on()


def talk(address, messages, method=LEARNER_METHOD, timeout_s=100, token="", compression=None):
    """Send messages, each after the answer to the one before; (number of answers, code, text)."""
    outgoing = queue.SimpleQueue()
    num_answers = 0
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options, compression) as channel:
        call = channel.stream_stream("/" + "/".join(method))(
            iter(outgoing.get, None), timeout=timeout_s, metadata=token_metadata(token)
        )
        try:
            for message in messages:
                outgoing.put(message)
                next(call)
                num_answers += 1
            outgoing.put(None)
            for _ in call:
                num_answers += 1
            return num_answers, "OK", ""
        except StopIteration:
            return num_answers, "OK", ""
        except grpc.RpcError as error:
            return num_answers, error.code().name, error.details()
        finally:
            outgoing.put(None)


def hello(**changes):
    message = pb.EnvironmentMessage.FromString(HELLO)
    for name, value in changes.items():
        setattr(message.hello, name, value)
    return message.SerializeToString()


def step(**changes):
    message = pb.EnvironmentMessage.FromString(LATER)
    for name, value in changes.items():
        field = getattr(message.step, name)
        del field[:]
        field.extend(value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("messages", "num_answers", "code", "text"),
    [
        ([b"\xff" * 9], 0, "INVALID_ARGUMENT", "Expected an EnvironmentMessage"),
        ([FIRST], 0, "INVALID_ARGUMENT", "first message must be a Hello, got step"),
        ([hello(version=9)], 0, "FAILED_PRECONDITION", "the other version 9"),
        ([hello(num_envs=2**30)], 0, "INVALID_ARGUMENT", "num_envs must be from 1"),
        (
            [encode_hello(Hello("x", 1, Spec(ArraySpec("uint8", (2,)), ArraySpec("int64"))))],
            0,
            "FAILED_PRECONDITION",
            "works with observations float32[3], these environments have uint8[2]",
        ),
        (
            [encode_hello(Hello("x", 60_000, SPEC))],
            0,
            "RESOURCE_EXHAUSTED",
            "The rows of one step may have 1048576 bytes",
        ),
        ([HELLO, HELLO], 1, "INVALID_ARGUMENT", "Expected a Step, got hello"),
        ([HELLO, LATER], 1, "INVALID_ARGUMENT", "every done must be true"),
        ([HELLO, FIRST, b"garbage"], 2, "INVALID_ARGUMENT", "Expected an EnvironmentMessage"),
        (
            [HELLO, FIRST, step(reward=[float("nan")])],
            2,
            "INVALID_ARGUMENT",
            "1e+09, got nan",
        ),
        (
            [HELLO, FIRST, step(observation=[np.float32([0, -2e9, 0]).tobytes()])],
            2,
            "INVALID_ARGUMENT",
            "Observation 0 must be from -1e+09 to 1e+09, got -2e+09.",
        ),
        ([encode_failure("boo")], 0, "INVALID_ARGUMENT", "must be a Hello, got failure"),
        (
            [HELLO, FIRST, LATER, step(observation=[bytes(5)])],
            3,
            "INVALID_ARGUMENT",
            "Observation 0 must have 12 bytes (float32[1, 3]), got 5",
        ),
        ([HELLO, FIRST, bytes(2 << 20)], 2, "RESOURCE_EXHAUSTED", "larger than max"),
        ([HELLO, FIRST, encode_failure("it broke")], 2, "OK", ""),
        ([HELLO, FIRST, LATER, LATER], 4, "OK", ""),
        ([], 0, "OK", ""),
    ],
)
def test_what_breaks_a_rule_gets_a_status_and_a_sentence(it, messages, num_answers, code, text):
    answers, got_code, got_text = talk(it.address, messages)
    assert (answers, got_code) == (num_answers, code)
    assert text in got_text
    it.wait_for_streams(1)


def test_another_service_is_unknown(it):
    assert talk(it.address, [HELLO], ENVIRONMENTS_METHOD)[1] == "UNIMPLEMENTED"


def test_a_path_that_is_no_text_neither_closes_the_port_nor_ends_streams(it, caplog):
    for _ in range(3):
        wait_until(lambda: is_open(it.address))
        assert send_path(it.address, b"/x\xff")
        wait_until(lambda: talk(it.address, [HELLO, FIRST], timeout_s=5)[:2] == (2, "OK"))
    it.wait_for_rollouts(3)
    it.wait_for_streams(1)
    assert "the gateway listens again" in caplog.text


def is_open(address):
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10):
        return True
    return False


@pytest.mark.slow
def test_who_says_nothing_is_not_waited_for(it):
    outgoing = queue.SimpleQueue()
    with grpc.insecure_channel(it.address) as channel:
        call = channel.stream_stream("/" + "/".join(LEARNER_METHOD))(
            iter(outgoing.get, None), timeout=30
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        outgoing.put(None)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "has not introduced itself in time" in caught.value.details()


@pytest.mark.slow
def test_who_takes_no_step_is_not_waited_for(it):
    outgoing = queue.SimpleQueue()
    with grpc.insecure_channel(it.address) as channel:
        call = channel.stream_stream("/" + "/".join(LEARNER_METHOD))(
            iter(outgoing.get, None), timeout=30
        )
        for message in (HELLO, FIRST, LATER):
            outgoing.put(message)
            next(call)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        outgoing.put(None)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "has not taken a step in time" in caught.value.details()
    it.wait_for_streams(1)


def test_who_says_nothing_makes_room_for_who_comes_later():
    limits = Limits(max_streams=4, max_introductions=5, handshake_s=60.0)
    with under_attack(limits=limits) as it, silent_streams(it.address, 12) as calls:
        wait_until(lambda: sum(not call.is_active() for call in calls) >= 7)
        assert talk(it.address, [HELLO, FIRST])[:2] == (2, "OK")
        it.bystander.plays_on()
        ended = [call for call in calls if not call.is_active()]
        assert {call.code() for call in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert "so this one ends; send it at once" in ended[0].details()


def test_unauthenticated_peers_do_not_fill_the_log(caplog):
    others = Spec(ArraySpec("uint8", (2,)), ArraySpec("int64"))
    with under_attack() as it:
        for size in range(1, 4 * MAX_UNAUTHENTICATED_TEXTS):
            assert talk(it.address, [b"\xff" * size])[1] == "INVALID_ARGUMENT"
        wrong = encode_hello(Hello("x", 1, others))
        assert talk(it.address, [wrong])[1] == "FAILED_PRECONDITION"
        wait_until(lambda: "The learner works with observations" in caplog.text)
        num_texts = caplog.text.count("of env.proto, got")
        assert num_texts == MAX_UNAUTHENTICATED_TEXTS


@pytest.mark.slow
def test_who_stops_reading_is_not_waited_for():
    num_envs = 2048
    rows = [first_row(), later_row()]
    first, later = (
        encode_step({name: np.repeat(value, num_envs, axis=0) for name, value in row.items()})
        for row in rows
    )
    over = threading.Event()

    def messages():
        yield encode_hello(Hello("x", num_envs, SPEC))
        yield first
        while not over.is_set():
            yield later

    limits = Limits(max_stream_envs=num_envs, write_s=3.0)
    with under_attack(limits=limits) as it, grpc.insecure_channel(it.address) as channel:
        call = channel.stream_stream("/" + "/".join(LEARNER_METHOD))(messages(), timeout=200)
        try:
            it.wait_for_streams(2)
            it.wait_for_streams(1, 100)  # nobody reads, and the gateway gives up
            with pytest.raises(grpc.RpcError) as caught:
                for _ in call:
                    pass
        finally:
            over.set()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert "has not read its actions in time" in caught.value.details()


def test_noise_on_the_line_does_no_harm(it):
    host, _, port = it.address.rpartition(":")
    random_ = random.Random(1)
    silent = []
    for number in range(200):
        connection = socket.create_connection((host, int(port)), timeout=10)
        if number % 4 == 0:
            silent.append(connection)  # says nothing, and stays
            continue
        start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b""
        with contextlib.suppress(OSError), connection:
            connection.sendall(start + random_.randbytes(random_.randrange(1, 500)))
    it.wait_for_rollouts(5)
    for connection in silent:
        connection.close()


@pytest.mark.slow
def test_thousands_of_malformed_streams_do_no_harm(it):
    """Each is a conversation in which something is wrong from some point on."""
    path = "/" + "/".join(LEARNER_METHOD)
    numbers = iter(range(NUM_STREAMS))
    lock = threading.Lock()
    codes = []

    def play():
        random_ = random.Random(threading.get_ident())
        with grpc.insecure_channel(it.address) as channel:
            while True:
                with lock:
                    if next(numbers, None) is None:
                        return
                messages = [HELLO, FIRST, LATER, LATER]
                for i in range(random_.randrange(4), 4):
                    messages[i] = mutate(messages[i], random_)
                call = channel.stream_stream(path)(iter(messages), timeout=30)
                try:
                    for _ in call:
                        pass
                    codes.append("OK")
                except grpc.RpcError as error:
                    codes.append(error.code().name)

    with run_in_threads(*[play] * 4):
        pass
    assert len(codes) == NUM_STREAMS
    allowed = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
    assert set(codes) <= allowed
    assert codes.count("INVALID_ARGUMENT") > NUM_STREAMS / 3
    it.wait_for_streams(1)


class Cable:
    """A connection through which bytes flow, until it is pulled."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.target = (host, int(port))
        self.pulled = threading.Event()
        self.over = threading.Event()

    def carry(self):
        """One connection; after the cable was pulled its bytes go nowhere, and nobody is told."""
        near, _ = self.listener.accept()
        far = socket.create_connection(self.target)
        with self.listener, near, far, selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while not self.over.is_set():
                for key, _ in selector.select(0.05):
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif not self.pulled.is_set():
                        key.data.sendall(data)


def test_a_half_open_connection_is_noticed(it):
    cable = Cable(it.address)
    with run_in_threads(cable.carry):
        try:
            with client(cable.address, make=lambda: counting_group(1)):
                it.wait_for_streams(2)
                cable.pulled.set()
                it.wait_for_streams(1)  # though nothing says that the other end is gone
        finally:
            cable.over.set()


@pytest.mark.slow
def test_a_host_that_comes_too_often_is_told_to_wait():
    limits = Limits(connections_at_once=3, connections_per_s=0.001)  # one is the bystander's
    with under_attack(limits=limits) as it:
        codes = [talk(it.address, [HELLO])[1:] for _ in range(3)]
    assert [code for code, _ in codes] == ["OK", "OK", "RESOURCE_EXHAUSTED"]
    assert "A host may open 0.001 streams a second" in codes[2][1]


def test_a_learner_that_ends_says_so():
    with learner(listen=["127.0.0.1:0"]) as it:
        outgoing = queue.SimpleQueue()
        channel = grpc.insecure_channel(it.address)
        call = channel.stream_stream("/" + "/".join(LEARNER_METHOD))(iter(outgoing.get, None))
        outgoing.put(HELLO)
        next(call)
        wait_until(lambda: it.gateways.num_streams == 1)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    outgoing.put(None)
    channel.close()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "The learner is ending" in caught.value.details()
