"""Many clients at once, a learner that ends, and ends that are not all updated at the same time."""

import functools
import json
from pathlib import Path

import pytest

from libtorchbeast.local_socket import JsonSocket
from libtorchbeast.rpc.address import Address, dial_unix
from libtorchbeast.rpc.env_client import LearnerGone, dialing_back_off, pause_of
from libtorchbeast.rpc.handshake import MAX_RETRY_S, MINOR, Hello, Refused, retry_in
from libtorchbeast.rpc.limits import Admission, ConnectionRate, Limits
from libtorchbeast.rpc.messages import encode_hello, retry_metadata, retry_s_in
from libtorchbeast.rpc.security import Security
from tests.helpers.attacks import silent_streams, under_attack
from tests.helpers.certificates import write_secret
from tests.helpers.counting import counting_group
from tests.helpers.remote import check_rollouts, client, learner
from tests.helpers.threads import wait_until
from tests.test_attacks import Recording, address_of
from tests.test_rpc_bad_peers import talk

RECORDED = {
    minor: json.loads((Path(__file__).parent / f"recorded_client_2_{minor}.json").read_text())
    for minor in range(MINOR)
}


@pytest.fixture
def token(tmp_path):
    return Security(token_file=write_secret(tmp_path / "token", "secret"))


def test_pauses_before_dialing_again_are_spread_over_their_whole_length():
    pauses = []
    for _ in range(300):
        back_off = dialing_back_off()
        pauses.append([back_off.next_s() for _ in range(5)][-1])  # 1.6 s at most
    assert min(pauses) < 0.2
    assert max(pauses) > 1.4
    assert max(pauses) <= 1.6


def test_who_comes_too_early_gets_turns_one_after_the_other():
    rate = ConnectionRate(Limits(connections_at_once=1, connections_per_s=10))
    rate.take("ipv4:192.0.2.7:1")
    retries = []
    for port in range(50):
        with pytest.raises(Refused) as refused:
            rate.take(f"ipv4:192.0.2.7:{port}")
        retries.append(refused.value.retry_s)
    assert retries == sorted(retries)
    assert retries[0] == pytest.approx(0.1, abs=0.02)
    assert retries[-1] == pytest.approx(5.0, abs=0.5)


def test_a_learner_that_says_when_to_come_again_is_obeyed_within_reason():
    assert retry_s_in(retry_metadata(Refused("UNAVAILABLE", "", 1.25))) == 1.25
    assert retry_s_in(retry_metadata(Refused("UNAVAILABLE", ""))) is None
    assert retry_s_in((("retry-after-ms", "soon"),)) is None
    assert retry_in(-1) == 0.0
    assert retry_in(1e9) == MAX_RETRY_S
    gone = LearnerGone("", 7.0)
    assert pause_of(gone, dialing_back_off()) == 7.0
    assert pause_of(LearnerGone(""), dialing_back_off()) <= 0.1


class Silent:
    """A stream of which only the host matters."""

    def __init__(self):
        self.peer, self.ended = "ipv4:192.0.2.7:1", None

    def end(self, why):
        self.ended = why


@pytest.mark.parametrize(("has_token", "num_stay"), [(False, 2), (True, 5)])
def test_who_has_shown_the_token_makes_no_room_for_who_has_not(has_token, num_stay):
    admission = Admission(Limits(max_introductions=2, max_streams=5))
    streams = [Silent() for _ in range(8)]
    introductions = [admission.introduction(stream, has_token) for stream in streams]
    for introduction in introductions:
        introduction.__enter__()
    assert [stream.ended is None for stream in streams] == [False] * (8 - num_stay) + (
        [True] * num_stay
    )
    with admission.introduction(Silent(), not has_token):
        assert sum(stream.ended is None for stream in streams) == num_stay


def test_a_herd_with_the_token_is_not_thinned_out_while_it_introduces_itself(token):
    limits = Limits(max_introductions=2, handshake_s=60.0)
    with (
        under_attack(token, limits=limits) as it,
        silent_streams(it.address, 20, token="secret") as calls,
    ):
        it.wait_for_rollouts(5)
        assert all(call.is_active() for call in calls)


def test_who_comes_too_early_asks_again_over_the_same_connection(token, monkeypatch, caplog):
    limits = Limits(connections_at_once=1, connections_per_s=1.0)
    channels = []
    make_channel = Security.aio_channel

    def count(*args):
        channels.append(args)
        return make_channel(*args)

    with under_attack(token, limits=limits) as it:
        monkeypatch.setattr(Security, "aio_channel", count)
        with client(it.address, security=token):
            it.wait_for_streams(2)
    assert "A host may open 1 streams a second" in caplog.text
    assert len(channels) == 1


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_learner_that_ends_lets_its_clients_wait_for_the_next_one(kind, tmp_path, caplog):
    caplog.set_level("INFO")
    Recording.made.clear()
    make = functools.partial(counting_group, 1, Recording)
    with learner(listen=[address_of(kind, tmp_path)]) as first, client(first.address, make=make):
        first.wait_for_rollouts(3)
        first.close()
        wait_until(lambda: "The learner is ending; try again later. Dialing" in caplog.text)
        with learner(listen=[first.address]) as second:
            second.wait_for_rollouts(3)
    assert len(Recording.made) == 1, "the same environment, and its episode"
    assert "refused these environments" not in caplog.text
    check_rollouts([*first.rollouts, *second.rollouts], first.unroll_length)


# ------------------------------------------------------------------- ends that are not of one age


@pytest.mark.parametrize("minor", RECORDED)
def test_a_recorded_client_of_an_older_minor_version_plays(minor):
    """The bytes that it sent; it must not notice that the learner is newer."""
    messages = [bytes.fromhex(text) for text in RECORDED[minor]["messages"]]
    with learner(listen=["127.0.0.1:0"]) as it:
        num_answers, code, text = talk(it.address, messages)
        assert (num_answers, code, text) == (len(messages), "OK", "")
        wait_until(lambda: len(it.rollouts) == 3)
    assert check_rollouts(it.rollouts, it.unroll_length) == {4711: 12}


@pytest.mark.parametrize("minor", RECORDED)
def test_a_recorded_host_of_an_older_minor_version_gets_a_lane(minor, tmp_path):
    with learner(listen=[f"unix:{tmp_path}/socket"]) as it:
        host = JsonSocket(dial_unix(Address.parse(it.address).path))
        host.send("hello", **RECORDED[minor]["hello_json"])
        messages = []
        wait_until(lambda: bool((m := host.next()) and messages.append(m)) or len(messages) == 2)
        host.close()
    assert [message["kind"] for message in messages] == ["greeting", "lane"]
    assert messages[0]["minor"] <= minor + 1, "older ends take an end that is one newer"


@pytest.mark.parametrize(("minor", "is_taken"), [(MINOR + 1, True), (MINOR + 2, False)])
def test_a_newer_client_is_taken_within_the_window_of_versions(minor, is_taken):
    group = counting_group(1)
    newer = encode_hello(Hello("newer", 1, group.spec, minor=minor))
    group.close()
    with learner(listen=["127.0.0.1:0"]) as it:
        num_answers, code, text = talk(it.address, [newer])
    if is_taken:
        assert (num_answers, code) == (1, "OK")
    else:
        assert (num_answers, code) == (0, "FAILED_PRECONDITION")
        assert f"version 2.{MINOR} of the protocol, the other version 2.{minor}; update" in text
