"""Environments that listen at a port, as a learner in another language sees them."""

import contextlib
import queue

import grpc
import pytest

from libtorchbeast.rpc.grpc_calls import CallServer
from libtorchbeast.rpc.handshake import Greeting
from libtorchbeast.rpc.limits import Limits, server_options
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD, encode_greeting
from tests.helpers.attacks import send_path
from tests.helpers.counting import Counting
from tests.helpers.remote import check_rollouts, learner, serving
from tests.helpers.threads import wait_until

WAIT_S = 60
GREETING = encode_greeting(Greeting("learner"))


@contextlib.contextmanager
def served(**options):
    with serving("127.0.0.1:0", **options) as server:
        wait_until(lambda: not server.server_address.endswith(":0"))
        yield server


@contextlib.contextmanager
def dialled(*messages, method=ENVIRONMENTS_METHOD, **options):
    """(server, call) of a stream that begins with these messages and is not closed."""
    rest = queue.Queue()
    for message in messages:
        rest.put(message)
    with served(**options) as server, grpc.insecure_channel(server.server_address) as channel:
        play = channel.stream_stream("/" + "/".join(method))
        yield server, play(iter(rest.get, None), timeout=WAIT_S)
        rest.put(None)


def end_of(call):
    """Code and text of the status that ends the stream."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def test_other_methods_are_not_implemented():
    with dialled(method=("other.Service", "Play")) as (_, call):
        code, text = end_of(call)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "Environments.Play" in text


def test_a_path_that_is_no_text_does_not_end_the_server():
    with dialled(GREETING) as (server, call):
        next(call)  # Hello
        assert send_path(server.server_address, b"/x\xff")
        next(call)  # the first Step
        with grpc.insecure_channel(server.server_address) as channel:
            another = channel.stream_stream("/other.Service/Play")(iter(()), timeout=WAIT_S)
            assert end_of(another)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_call_that_comes_while_the_server_stops_is_ended():
    server = CallServer(pytest.fail, server_options(Limits()))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/x/y")(iter(()), timeout=WAIT_S)
        wait_until(lambda: any(event.tag for event in list(server._found)))  # nobody has seen it
        server.stop()
        assert end_of(call)[0] is grpc.StatusCode.UNAVAILABLE


class SaysBytes(Counting):
    """Raises a text that UTF-8 has no bytes for, as names of files may be."""

    def __init__(self):
        raise ValueError("bad \udcff name")


def test_an_error_that_is_no_utf8_ends_its_stream_only():
    with dialled(GREETING, env_class=SaysBytes) as (server, call):
        _, text = end_of(call)
        assert "bad ? name" in text
        with grpc.insecure_channel(server.server_address) as channel:
            another = channel.stream_stream("/other.Service/Play")(iter(()), timeout=WAIT_S)
            assert end_of(another)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_learner_that_does_not_introduce_itself_is_sent_away_with_a_reason():
    with dialled(limits=Limits(handshake_s=0.1)) as (_, call):
        code, text = end_of(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "has not introduced itself in time" in text


def test_environments_that_end_say_so():
    with dialled(GREETING) as (server, call):
        next(call)  # Hello
        next(call)  # the first Step
        server.stop()
        code, _ = end_of(call)
    assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_a_connection_outlives_environments_that_are_busy_for_longer_than_its_heartbeat():
    """Pings are answered though the only thread of Python is in the environments."""
    with served(build_s=7.0) as server:
        limits = Limits(keepalive_s=1.5)
        with learner(server_addresses=[server.server_address], limits=limits) as ours:
            ours.wait_for_rollouts(1, seconds=20)
    assert len(check_rollouts(ours.rollouts, ours.unroll_length)) == 2  # not those of a second call
