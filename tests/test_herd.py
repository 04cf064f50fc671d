"""Many clients at once: when each of them dials again, and who makes room for whom."""

import pytest

from libtorchbeast.rpc.dialing import LearnerGone, dialing_back_off, pause_of
from libtorchbeast.rpc.handshake import MAX_RETRY_S, Refused, retry_in
from libtorchbeast.rpc.limits import Admission, ConnectionRate, Limits
from libtorchbeast.rpc.messages import retry_metadata, retry_s_in
from libtorchbeast.rpc.security import Security
from tests.helpers.attacks import under_attack
from tests.helpers.remote import client


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


@pytest.mark.slow
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
