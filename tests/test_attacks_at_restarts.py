"""Herds of clients, a learner that ends, ends of other versions; see test_attacks.py."""

import contextlib
import functools
import json
from pathlib import Path

import pytest

from libtorchbeast.json_socket import JsonSocket
from libtorchbeast.rpc.address import Address, dial_unix
from libtorchbeast.rpc.env_client import EnvironmentClient
from libtorchbeast.rpc.handshake import MINOR, Hello, hello_from_json
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import encode_hello
from tests.helpers.attacked_training import attacked_training, cart_pole_group
from tests.helpers.attacks import Recording, address_of, silent_streams, under_attack
from tests.helpers.counting import counting_group
from tests.helpers.remote import check_rollouts, client, learner, running
from tests.helpers.threads import wait_until
from tests.test_rpc_bad_peers import talk

RECORDED = {
    minor: json.loads((Path(__file__).parent / f"recorded_client_2_{minor}.json").read_text())
    for minor in range(MINOR)
}


def test_a_herd_with_the_token_is_not_thinned_out_while_it_introduces_itself(token):
    limits = Limits(max_introductions=2, handshake_s=60.0)
    with (
        under_attack(token, limits=limits) as it,
        silent_streams(it.address, 20, token="secret") as calls,
    ):
        it.bystander.plays_on()
        assert all(call.is_active() for call in calls)


@pytest.mark.parametrize("kind", [pytest.param("tcp", marks=pytest.mark.slow), "unix"])
def test_a_learner_that_ends_lets_its_clients_wait_for_the_next_one(kind, tmp_path, caplog):
    """Beside it, another learner and its client do not notice."""
    caplog.set_level("INFO")
    make = functools.partial(counting_group, 1, Recording.forget())
    with (
        under_attack() as beside,
        learner(listen=[address_of(kind, tmp_path)]) as first,
        client(first.address, make=make),
    ):
        first.wait_for_rollouts(3)
        first.close()
        wait_until(lambda: "The learner is ending; try again later. Dialing" in caplog.text)
        beside.bystander.plays_on()
        with learner(listen=[first.address]) as second:
            second.wait_for_rollouts(3)
    assert len(Recording.made) == 1, "the same environment, and its episode"
    assert "refused these environments" not in caplog.text
    check_rollouts([*first.rollouts, *second.rollouts], first.unroll_length)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_lets_a_herd_wait_for_the_next_learner(tmp_path, caplog):
    """All of its clients are there again, with the same environments, and nobody failed."""
    caplog.set_level("INFO")
    num_made = []

    def make():
        num_made.append(None)
        return cart_pole_group()

    args = ("--env", "CartPole-v1")
    with contextlib.ExitStack() as stack:
        with (
            attacked_training(tmp_path, *args) as first,
            first.bystander() as bystander,
        ):
            herd = EnvironmentClient([make] * 8, first.address)
            stack.enter_context(running(herd))
            first.wait_for(lambda: first.num_streams == 9)
            bystander.plays_on()
        wait_until(lambda: "The learner is ending; try again later. Dialing" in caplog.text)
        again = attacked_training(tmp_path, *args, address=first.address)
        with again as second, second.bystander():
            second.wait_for(lambda: second.num_streams == 9)
    assert len(num_made) == 8
    assert "refused these environments" not in caplog.text


# ------------------------------------------------------------------- ends that are not of one age


@pytest.mark.parametrize("minor", RECORDED)
def test_a_recorded_client_of_an_older_minor_version_plays(minor):
    """The bytes that it sent; it must not notice that the learner is newer, nor others that it
    is there."""
    messages = [bytes.fromhex(text) for text in RECORDED[minor]["messages"]]
    with under_attack() as it:
        num_answers, code, text = talk(it.address, messages)
        assert (num_answers, code, text) == (len(messages), "OK", "")
        it.bystander.plays_on()
        wait_until(lambda: len(rollouts_of(it, 4711)) == 3)
    assert check_rollouts(rollouts_of(it, 4711), it.unroll_length) == {4711: 12}


def rollouts_of(it, id):
    return [rollout for rollout in list(it.rollouts) if rollout[0]["frame"][0, 0, 0] == id]


@pytest.mark.parametrize("minor", RECORDED)
def test_a_recorded_host_of_an_older_minor_version_gets_a_lane(minor, tmp_path):
    with under_attack(listen=[f"unix:{tmp_path}/socket"]) as it:
        host = JsonSocket(dial_unix(Address.parse(it.address).path))
        host.send("hello", **RECORDED[minor]["hello_json"])
        messages = []
        wait_until(lambda: bool((m := host.next()) and messages.append(m)) or len(messages) == 2)
        it.bystander.plays_on()
        host.close()
    assert [message["kind"] for message in messages] == ["greeting", "lane"]
    assert messages[0]["minor"] <= minor + 1, "older ends take an end that is one newer"
    assert not hello_from_json(RECORDED[minor]["hello_json"], 1 << 20).knows_marks


@pytest.mark.parametrize(("minor", "is_taken"), [(MINOR + 1, True), (MINOR + 2, False)])
def test_a_newer_client_is_taken_within_the_window_of_versions(minor, is_taken):
    group = counting_group(1)
    newer = encode_hello(Hello("newer", 1, group.spec, minor=minor))
    group.close()
    with under_attack() as it:
        num_answers, code, text = talk(it.address, [newer])
    if is_taken:
        assert (num_answers, code) == (1, "OK")
    else:
        assert (num_answers, code) == (0, "FAILED_PRECONDITION")
        assert f"version 2.{MINOR} of the protocol, the other version 2.{minor}; update" in text
