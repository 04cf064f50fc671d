"""Actors that carry the model, where something goes wrong: what ends, and what the log says."""

import contextlib
import dataclasses
import errno
import os
import queue
import socket
import time
from types import SimpleNamespace

import grpc
import pytest

from libtorchbeast.groups import Broken
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.actor_messages import (
    MAX_ROLLOUTS_AHEAD,
    decode_welcome,
    encode_request,
    encode_taken,
    encode_welcome,
)
from libtorchbeast.rpc.handshake import Greeting, Hello, Refused
from libtorchbeast.rpc.learner_connection import LearnerConnection
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import ACTOR_METHOD
from tests.helpers.actors import Publisher, acting
from tests.helpers.attacks import fake_end
from tests.helpers.counting import Broken as NeverStepping
from tests.helpers.counting import counting_group
from tests.helpers.remote import client, learner
from tests.helpers.threads import wait_until
from tests.test_remote_actor import actor_hello, some_rollout
from tests.test_rpc_bad_peers import talk


def welcome_bytes(publisher):
    return encode_welcome(publisher.offers.make(), Greeting("learner"), "float32")


# ------------------------------------------------------------------------------- the actor's end


@pytest.mark.slow
def test_the_learner_logs_what_the_environments_of_an_actor_failed_with(caplog):
    caplog.set_level("INFO")
    publisher = Publisher(env="tests.helpers.counting:Broken")
    for number in range(1, 4):  # which of two ends closes the stream first is a race
        with publisher.learning() as it:
            group = counting_group(1, NeverStepping)
            with pytest.raises(Broken), acting(it.address, group=group) as (link, _):
                wait_until(lambda link=link: link._is_stopped)
            wait_until(lambda n=number: caplog.text.count("An environment at ") == n, 10)
    raised = "RuntimeError: the wheel was never there"
    logged = [text for text in caplog.messages if text.startswith("An environment at ")]
    assert all(raised in text for text in logged)
    assert "sent an invalid message" not in caplog.text, "it is not the learner's fault"
    assert "Dialing again" not in caplog.text


def test_a_learner_of_other_environments_is_none_for_an_actor_and_both_are_named(caplog):
    answer = welcome_bytes(Publisher())
    with (
        fake_end([answer], method=ACTOR_METHOD) as address,
        acting(address, group=counting_group(1)),
    ):
        wait_until(lambda: "Trying again" in caplog.text)
    assert (
        f"The learner at {address} does not fit this actor: The learner works with" in caplog.text
    )
    assert "observations float32[10, 5], these environments have float32[3]." in caplog.text


def test_a_taken_without_a_rollout_breaks_a_rule(caplog):
    answers = [welcome_bytes(Publisher()), encode_taken(0)]
    with fake_end(answers, method=ACTOR_METHOD) as address, acting(address, 1):
        wait_until(lambda: "Trying again" in caplog.text)
    assert "sent an invalid message: A Taken must answer a rollout, got one more" in caplog.text


def test_a_learner_cannot_have_an_actor_keep_any_number_of_rollouts():
    publisher = Publisher()
    message = pb.LearnerMessage.FromString(welcome_bytes(publisher))
    hello = Hello("test", 1, publisher.spec)
    message.welcome.rollouts_ahead = MAX_ROLLOUTS_AHEAD
    assert decode_welcome(message.SerializeToString(), hello).rollouts_ahead == MAX_ROLLOUTS_AHEAD
    message.welcome.rollouts_ahead += 1
    with pytest.raises(Refused, match="rollouts_ahead must be at most 64, got 65"):
        decode_welcome(message.SerializeToString(), hello)


# ------------------------------------------------------------------------------ the gateway's end


@contextlib.contextmanager
def raw_actor(it, publisher):
    """A stream of its own: what puts a message into it, the stream, and the Welcome."""
    messages = queue.SimpleQueue()
    messages.put(actor_hello(publisher))
    options = [("grpc.http2.bdp_probe", 0)]  # else its buffers grow
    with grpc.insecure_channel(it.address, options) as channel:
        method = channel.stream_stream("/" + "/".join(ACTOR_METHOD))
        call = method(iter(messages.get, None), timeout=100)
        try:
            welcome = decode_welcome(next(call), Hello("raw", 1, publisher.spec))
            yield messages.put, call, welcome
        finally:
            messages.put(None)
            call.cancel()


def fetch_weights(put, call, have):
    put(encode_request(have))
    while True:
        weights = pb.LearnerMessage.FromString(next(call)).weights
        if weights.offset + len(weights.data) == weights.num_bytes:
            return weights.version


def only_fetch(publisher, put, call, updates, seconds):
    """One version after the other, each of them `updates` old before the next is asked for."""
    deadline, have = time.monotonic() + seconds, -1
    while time.monotonic() < deadline:
        have = fetch_weights(put, call, have)
        publisher.offers.publish(publisher.learner.model, have + updates)


def test_who_only_asks_for_weights_is_not_kept():
    publisher = Publisher()
    limits = Limits(rollout_s=1.0)
    with publisher.learning(limits=limits) as it, raw_actor(it, publisher) as (put, call, _):
        with pytest.raises(grpc.RpcError) as caught:
            only_fetch(publisher, put, call, updates=1, seconds=30)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "The other end has not sent a rollout in time."


@pytest.mark.slow
def test_an_actor_whose_weights_are_always_too_old_is_kept():
    publisher = Publisher(max_policy_lag=3)
    limits = Limits(rollout_s=1.0)
    with publisher.learning(limits=limits) as it, raw_actor(it, publisher) as (put, call, _):
        only_fetch(publisher, put, call, updates=5, seconds=4)
        with pytest.raises(grpc.RpcError, match="has not sent a rollout in time"):
            only_fetch(publisher, put, call, updates=1, seconds=30)


@pytest.mark.slow
def test_an_actor_that_waits_for_the_learner_has_time():
    """One rollout is learnt from, one is queued, one waits in its lane longer than `rollout_s`."""
    publisher = Publisher()
    options = {"limits": Limits(rollout_s=1.0), "batch_size": 2, "update_s": 4.0}
    with publisher.learning(**options) as it, raw_actor(it, publisher) as (put, call, welcome):
        for _ in range(3):
            put(some_rollout(welcome))
        for _ in range(3):
            assert pb.LearnerMessage.FromString(next(call)).WhichOneof("message") == "taken"
        with pytest.raises(grpc.RpcError, match="has not sent a rollout in time"):
            next(call)


def test_who_does_not_read_its_weights_is_told_that_and_called_an_actor(caplog):
    publisher = Publisher(env="Mock")  # whose weights fit into nobody's buffers
    with publisher.learning(limits=Limits(write_s=1.0)) as it:
        with raw_actor(it, publisher) as (put, call, _):
            it.wait_for_streams(1)
            put(encode_request(-1))
            it.wait_for_streams(0)
            with pytest.raises(grpc.RpcError, match="The other end has not read its weights in"):
                list(call)
        wait_until(lambda: "An actor was refused: The other end has not read" in caplog.text)


def test_a_model_of_very_many_tensors_is_refused_to_actors_and_ends_nothing(monkeypatch):
    publisher = Publisher()
    make = publisher.offers.make

    def many():
        offer = make()
        return dataclasses.replace(offer, tensors=offer.tensors * 3000)

    monkeypatch.setattr(publisher.offers, "make", many)
    with publisher.learning() as it:
        for _ in range(2):
            num_answers, code, text = talk(it.address, [actor_hello(publisher)], ACTOR_METHOD)
            assert (num_answers, code) == (0, "FAILED_PRECONDITION")
            assert "those of the learner's" in text
            assert "dial in with polybeast_env" in text
        assert it.gateways.num_lanes == 0
        assert not it.errors


@pytest.fixture
def lose_descriptor(monkeypatch):
    """The learner has none left when it sends the one with this number, the first being 1."""

    def lose(which):
        numbers = iter(range(1, 100))

        def dup(fd):
            if next(numbers) == which:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return os.dup(fd)

        ours = SimpleNamespace(dup=dup, close=os.close)
        monkeypatch.setattr("libtorchbeast.json_socket.os", ours)

    return lose


LOST = "refused: The learner has no descriptor left; wait."


@pytest.mark.parametrize("which", [1, 2], ids=["model", "lane"])
def test_an_actor_comes_again_if_the_learner_has_no_descriptor_left(which, lose_descriptor, caplog):
    publisher = Publisher()
    with publisher.learning() as it:
        lose_descriptor(which)
        with acting(it.address, 1):
            it.wait_for_rollouts(2)
        wait_until(lambda: it.gateways.num_lanes == 1)
    assert f"An actor was {LOST}" in caplog.text


def test_environments_come_again_if_the_learner_has_no_descriptor_left(lose_descriptor, caplog):
    with learner(listen=["127.0.0.1:0"]) as it:
        lose_descriptor(1)
        with client(it.address):
            it.wait_for_rollouts(2)
        wait_until(lambda: it.gateways.num_lanes == 1)
    assert f"Environments were {LOST}" in caplog.text


def test_a_model_that_comes_again_does_not_replace_the_one_that_is_there():
    publisher = Publisher()
    offer = publisher.offers.make()
    ours, theirs = socket.socketpair()
    with ours:
        connection = LearnerConnection(theirs.detach(), -1, Limits())
        first, second = os.dup(offer.weights_fd), os.dup(offer.weights_fd)
        connection._take_model({"offer": offer.to_json(), "fd": first})
        publication = connection.publication
        connection._take_model({"offer": offer.to_json(), "fd": second})
        connection._take_model({"offer": offer.to_json(), "fd": None})
        assert connection.publication is publication is not None
        for fd in (first, second):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        connection._socket.close()
