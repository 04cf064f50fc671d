"""Learners that mean no good to environments, those that listen and those that dial.

Beside each attack another learner, or another environment, goes on; see test_attacks.py.
"""

import contextlib
import functools
import json
import signal

import grpc
import numpy as np
import pytest
from gymnasium import spaces

import libtorchbeast
import torchbeast
from libtorchbeast.env_host import ActionCheck, BadAnswer
from libtorchbeast.json_socket import JsonSocket
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.address import Address, dial_unix
from libtorchbeast.rpc.env_client import EnvironmentClient
from libtorchbeast.rpc.handshake import Greeting
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD, encode_greeting
from libtorchbeast.rpc.security import Security
from libtorchbeast.specs import ArraySpec, discrete, spec_of_space
from tests.helpers.attacks import (
    Bystander,
    Recording,
    address_of,
    fake_end,
    fake_local_learner,
    under_attack,
)
from tests.helpers.certificates import write_secret
from tests.helpers.counting import NUM_ACTIONS, counting_group, next_action
from tests.helpers.remote import check_rollouts, client, learner, running, serving
from tests.helpers.threads import wait_until
from tests.helpers.training import ROOT, TIMEOUT_S, RemoteEnvironments
from tests.test_rpc_bad_peers import talk


@pytest.fixture
def soon(monkeypatch):
    """Environments that are refused ask again at once: the length of the pause is not the point."""
    monkeypatch.setattr("libtorchbeast.rpc.dialing.REFUSED_S", 0.05)
    monkeypatch.setattr("libtorchbeast.rpc.dialing.MAX_REFUSED_S", 0.1)


@pytest.fixture
def recorded():
    return Recording.forget()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_no_learner_may_compress_where_environments_listen(token, compression):
    with (
        serving("127.0.0.1:0", security=token) as server,
        learner(server_addresses=[server.server_address], security=token) as it,
    ):
        bystander = Bystander(it, 2)
        options = {"token": "secret", "compression": compression}
        ended = talk(server.server_address, [bytes(32 << 20)], ENVIRONMENTS_METHOD, **options)
        assert ended[:2] == (0, "UNIMPLEMENTED")
        bystander.plays_on()
    bystander.check(one_stream=True)


@pytest.mark.parametrize(
    ("compression", "end"),
    [
        (None, "Playing with the learner"),  # it would be taken for one
        (grpc.Compression.Gzip, "It ended the stream at once"),
        (grpc.Compression.Deflate, "It ended the stream at once"),
    ],
)
def test_no_learner_may_compress_where_environments_dial(compression, end, recorded, caplog):
    """Nothing of what it sends is taken, not even its greeting."""
    caplog.set_level("INFO")
    greeting = [encode_greeting(Greeting("learner" + 1000 * "."))]
    with under_attack() as beside, contextlib.ExitStack() as stack:
        caplog.clear()
        with fake_end(greeting, compression=compression) as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: end in caplog.text)
            assert (compression is None) == ("Playing" in caplog.text)
            beside.bystander.plays_on()
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


def greet(address, greeting):
    """What a server answers to a learner's first words."""
    if not address.startswith("unix:"):
        words = [encode_greeting(greeting)]
        return talk(address, words, ENVIRONMENTS_METHOD, token=greeting.token)[1:]
    host = JsonSocket(dial_unix(Address.parse(address).path))
    try:
        host.send("greeting", **greeting.to_json())
        said = []
        wait_until(lambda: bool(said.append(host.next()) or said[-1]))
        return said[-1].get("code", said[-1]["kind"]), said[-1].get("text")
    finally:
        host.close()


@pytest.mark.parametrize("kind", ["tcp", pytest.param("unix", marks=pytest.mark.slow)])
def test_a_server_makes_no_more_groups_than_it_offers(kind, token, tmp_path, recorded):
    options = {"env_class": recorded, "num_streams": 2, "security": token}
    with serving(address_of(kind, tmp_path), **options) as server:
        with learner(server_addresses=[server.server_address], security=token) as it:
            it.wait_for_streams(2)
            bystander = Bystander(it, 4)
            for _ in range(10):
                code, text = greet(server.server_address, Greeting("greedy", "secret"))
                assert code == "UNAVAILABLE"
                assert "has 2 group(s) of environments, and all are in use; wait." in text
            bystander.plays_on()
            assert len(recorded.made) == 4, "two groups of two"
        bystander.check(one_stream=True)
        with learner(server_addresses=[server.server_address], security=token) as it:
            it.wait_for_streams(2)  # their places are free again


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_server_of_single_environments_makes_no_more_than_its_bound(
    kind, tmp_path, recorded, caplog, monkeypatch
):
    """It serves as many actors as call it, as TorchBeast's did; but not any number of them."""
    caplog.set_level("INFO")
    monkeypatch.setattr("libtorchbeast.rpc.env_server.MAX_STREAMS", 2)
    with running(libtorchbeast.Server(recorded, address_of(kind, tmp_path))) as server:
        wait_until(lambda: not server.server_address.endswith(":0"))
        with learner(server_addresses=3 * [server.server_address]) as it:
            it.wait_for_streams(2)
            bystander = Bystander(it, 2)
            wait_until(lambda: "takes 2 streams, and all are in use" in caplog.text)
            bystander.plays_on()
            assert len(recorded.made) == 2
        bystander.check(one_stream=True)


@pytest.mark.parametrize("bad", [NUM_ACTIONS, -1, 2**62])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_action_outside_the_space_reaches_no_environment_that_listens(
    kind, bad, tmp_path, recorded, caplog
):
    """Another learner plays with the other group of the same server."""
    sentence = f"cannot be used: An action must be from 0 to 4, got {bad}."
    with serving(address_of(kind, tmp_path), env_class=recorded, max_groups=2) as server:
        address = [server.server_address]
        with learner(server_addresses=address) as right:
            bystander = Bystander(right, 2)
            with learner(server_addresses=address, agent=lambda count: 0 * count + bad):
                wait_until(lambda: sentence in caplog.text)
                bystander.plays_on()
        assert set(recorded.taken) == set(range(NUM_ACTIONS)), "of the learner beside it"
        bystander.check(one_stream=True)
        with learner(server_addresses=address) as it:
            it.wait_for_rollouts(3)
        check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_action_outside_the_space_reaches_no_environment_that_dials(
    kind, tmp_path, recorded, caplog, soon
):
    """Another group of the same process plays with the same learner."""
    sentence = f"An action must be from 0 to {NUM_ACTIONS - 1}, got {NUM_ACTIONS}."

    def attack(row):
        ids, counts = row["frame"][..., 0], row["frame"][..., 1].long()
        return next_action(counts).where(ids != recorded.made[0], NUM_ACTIONS)

    makes = [lambda: counting_group(1, recorded), lambda: counting_group(1)]
    with contextlib.ExitStack() as stack:
        listen = [address_of(kind, tmp_path)]
        bad = stack.enter_context(learner(listen=listen, agent=attack, looks_at_rows=True))
        stack.enter_context(running(EnvironmentClient(makes, bad.address)))
        bystander = Bystander(bad, 1)
        wait_until(
            lambda: f"sent an invalid message: {sentence}" in caplog.text
        )  # the client's word
        by_learner = "raised: " if kind == "tcp" else "Environments were refused: "
        wait_until(lambda: by_learner + sentence in caplog.text)
        bystander.plays_on()
        assert recorded.taken == []
        bad.close()
        bystander.check(one_stream=True)
        with learner(listen=[bad.address]) as it:
            it.wait_for_environments(2)
        assert len(recorded.made) == 1, "the same environment"
        assert recorded.made[0] in check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize(
    ("action", "sentence"),
    [
        ({"move": [[0, 0], [1, 2]], "aim": [0.5, -9.0]}, None),
        ({"move": [[0, 0], [1, 3]], "aim": [0.5, 0.5]}, "from 0 to 2, got 3"),
        ({"move": [[0, 0], [2, 0]], "aim": [0.5, 0.5]}, "from 0 to 1, got 2"),
        ({"move": [[0, -1], [0, 0]], "aim": [0.5, 0.5]}, "from 0 to 2, got -1"),
        ({"move": [[0, 0], [0, 0]], "aim": [0.5, np.nan]}, "must be finite"),
    ],
)
def test_actions_of_any_space_are_checked(action, sentence):
    """Quantities beyond their bounds are the environment's to clip."""
    move, aim = spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (), np.float32)
    check = ActionCheck(spec_of_space(spaces.Dict({"move": move, "aim": aim})))
    arrays = {"move": np.array(action["move"]), "aim": np.array(action["aim"], np.float32)}
    with pytest.raises(BadAnswer, match=sentence) if sentence else contextlib.nullcontext():
        check(arrays)


def test_actions_of_few_bytes_are_checked():
    check = ActionCheck(ArraySpec("int32", (), 0, 3, categories=True))
    check(np.array([0, 3, 1], np.int32))
    with pytest.raises(BadAnswer, match="from 0 to 3, got 4"):
        check(np.array([0, 4, 1], np.int32))


@pytest.mark.parametrize("outside", [-1, 4])
def test_actions_in_lists_are_checked(outside):
    check = ActionCheck(discrete(4))
    check([0, 3])
    with pytest.raises(BadAnswer, match=f"from 0 to 3, got {outside}"):
        check([0, outside])


GREETING = Greeting("learner")
OTHER_VERSION = {**GREETING.to_json(), "version": 99}


def encoded(**changes):
    message = pb.AgentMessage.FromString(encode_greeting(GREETING))
    for name, value in changes.items():
        setattr(message.greeting, name, value)
    return message.SerializeToString()


def as_json(values):
    text = json.dumps(values).encode()
    return len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("kind", "answer", "why"),
    [
        pytest.param("tcp", [b"\xff" * 9], "Expected an AgentMessage", marks=pytest.mark.slow),
        ("tcp", [encoded(version=99)], "the other version 99.2; update the older one"),
        pytest.param(
            "tcp",
            [encode_greeting(GREETING), b"\xff" * 9],
            "Expected an AgentMessage",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "tcp",
            [encode_greeting(GREETING)] * 2,
            "Expected Actions, got greeting",
            marks=pytest.mark.slow,
        ),
        ("unix", [as_json({"kind": "greeting", "version": []})], "That is no Greeting"),
        pytest.param(
            "unix",
            [as_json({"kind": "greeting", **OTHER_VERSION})],
            "the other version 99",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["malformed", "version", "malformed_actions", "greets_again", "local", "local_version"],
)
def test_environments_wait_for_a_learner_that_makes_sense(
    kind, answer, why, tmp_path, recorded, caplog, soon
):
    """The process lives on, and so do its environments and their episodes."""
    fake = fake_end(answer) if kind == "tcp" else fake_local_learner(tmp_path, answer)
    with under_attack() as beside, contextlib.ExitStack() as stack:
        with fake as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: why in caplog.text)
            assert f"The learner at {address} sent an invalid message: " in caplog.text
            beside.bystander.plays_on()
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.slow
def test_environments_wait_for_a_learner_that_greets_and_then_refuses(recorded, caplog, soon):
    """Whatever they sent: their process lives on, with all its groups."""
    refused = "refused these environments: No, thank you. Trying again, with growing pauses."
    with under_attack() as beside, contextlib.ExitStack() as stack:
        with fake_end([encode_greeting(GREETING)], grpc.StatusCode.INVALID_ARGUMENT) as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: refused in caplog.text)
            beside.bystander.plays_on()
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", [pytest.param("tcp", marks=pytest.mark.slow), "unix"])
def test_environments_wait_while_a_wrong_first_client_has_decided(
    kind, tmp_path, recorded, caplog, soon
):
    """That client goes on, and so does another learner's."""
    with under_attack() as beside, contextlib.ExitStack() as stack:
        with learner(listen=[address_of(kind, tmp_path)]) as wrong:
            address = wrong.address
            with torchbeast.connect(address, num_actions=3) as other:
                other.step(np.zeros(2, np.uint8))
                make = functools.partial(counting_group, 1, recorded)
                stack.enter_context(client(address, make=make))
                wait_until(lambda: "refused these environments: The learner works" in caplog.text)
                beside.bystander.plays_on()
                other.step(np.zeros(2, np.uint8))
                wrong.wait_for_streams(1)
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_environments_wait_for_their_token_to_be_put_right(
    kind, token, tmp_path, recorded, caplog, soon
):
    """Also while its file is empty, missing, or open to others."""
    mine = tmp_path / "mine"
    write_secret(mine, "an old one")
    with under_attack(token, listen=[address_of(kind, tmp_path)]) as it:
        make = functools.partial(counting_group, 1, recorded)
        with client(it.address, make=make, security=Security(token_file=mine)):
            wait_until(lambda: "The token must be this end's, got another one" in caplog.text)
            for spoil, why in (
                (lambda: write_secret(mine, ""), "is empty"),
                (lambda: mine.chmod(0o644) or mine.write_text("secret"), "chmod 600"),
                (mine.unlink, "must be a file that can be read"),
            ):
                spoil()
                wait_until(lambda why=why: why in caplog.text)
                it.bystander.plays_on()
            write_secret(mine, "secret")
            it.wait_for_environments(2)
        [id] = recorded.made
    assert id in check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_fleet_waits_for_a_learner_that_makes_sense_and_for_its_token(token, tmp_path):
    """Nobody restarts its processes, neither by hand nor otherwise."""
    mine = write_secret(tmp_path / "mine", "an old one")
    args = ("--env", "tests.helpers.counting:Counting", "--num_servers", "2",
            "--envs_per_server", "1", "--token_file", str(mine))  # fmt: skip
    with contextlib.ExitStack() as stack:
        with fake_end([b"\xff" * 9]) as address:
            fleet = RemoteEnvironments(tmp_path, *args, "--connect", address, cwd=ROOT)
            stack.enter_context(fleet)
            rule = "sent an invalid message: Expected an AgentMessage"
            fleet.wait_for(lambda: rule in fleet.output, "nonsense")
            fleet.wait_for(lambda: len(fleet.family()) == 3, "both processes")
            family = fleet.family()
        with under_attack(token, listen=[address]) as it:
            fleet.wait_for(lambda: "got another one" in fleet.output, "refusal")
            it.bystander.plays_on()
            write_secret(mine, "secret")
            it.wait_for_environments(3, TIMEOUT_S)  # they ask now and then
        assert fleet.family() == family
        assert fleet.end(signal.SIGTERM) == 0
    assert "Traceback" not in fleet.output
