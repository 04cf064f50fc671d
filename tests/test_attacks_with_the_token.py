"""Attacks of who has the token, and of servers that the learner dials; see test_attacks.py."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import resource
import threading

import grpc
import numpy as np
import pytest
import torch

import torchbeast
from libtorchbeast.episode_info import MAX_NAMES
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.connected_clients import NO_TOKEN, ClientFigures, Clients
from libtorchbeast.rpc.grpc_streams import Watched
from libtorchbeast.rpc.handshake import Hello
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD, encode_failure, encode_hello
from libtorchbeast.shared_lanes import Lane
from libtorchbeast.specs import ArraySpec, discrete
from tests.helpers.attacked_training import attacked_training
from tests.helpers.attacks import (
    address_of,
    fake_end,
    grows_by_less_than,
    rss_of,
    under_attack,
)
from tests.helpers.certificates import Certificates, of_holder, write_secret
from tests.helpers.counting import NUM_ACTIONS
from tests.helpers.remote import check_rollouts, client, serving
from tests.helpers.threads import run_in_threads, wait_until
from tests.test_rpc_bad_peers import FIRST, SPEC, hello, talk
from tests.test_rpc_security import try_to_play
from torchbeast.core.stats import RunningStats
from torchbeast.run import model_size


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    made = Certificates.make(tmp_path_factory.mktemp("keys"))
    made.command("worker", "stolen")
    return made


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_nobody_may_compress(token, compression):
    with under_attack(token) as it, grows_by_less_than(48, it.gateways.pids[0]):
        large = bytes(32 << 20)
        ended = talk(it.address, [large], token="secret", compression=compression)
        assert ended[:2] == (0, "UNIMPLEMENTED")


@pytest.mark.slow
def test_memory_of_large_messages_is_given_back(token):
    with under_attack(token) as it:
        [pid] = it.gateways.pids
        before = rss_of(pid)
        attack = functools.partial(talk, it.address, [bytes(60 << 20)], token="secret")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            ended = [future.result() for future in [pool.submit(attack) for _ in range(8)]]
        assert {code for _, code, _ in ended} == {"RESOURCE_EXHAUSTED"}
        wait_until(lambda: rss_of(pid) - before < 24 << 20, 60)


@pytest.mark.slow
def test_a_client_with_many_environments_gets_its_share_of_the_learner_and_no_more(
    certificates, token
):
    """With 64 times as many it would have 98 % of every batch; here nobody waits for it."""
    # The learner is what everybody waits for, on a busy machine, too: its queue is always full.
    busy = {"batch_size": 8, "update_s": 0.1}
    ours = of_holder(certificates, "learner", token, tls_client_certs=True)
    honest = of_holder(certificates, "worker", token)
    with under_attack(ours, honest, num_envs=4, **busy) as it:
        with client(it.address, 256, security=of_holder(certificates, "stolen", token)):
            it.wait_for_streams(2)
            it.wait_for_rollouts(256)
            seen = len(it.rollouts)
            it.wait_for_rollouts(400)
        it.bystander.plays_on()
        recent = it.rollouts[seen : seen + 400]
        whose = [it.pool.client_of(int(rows["source"][0, 0])) for rows, _, _ in recent]
        assert set(whose) == {"name:worker", "name:stolen"}
        assert whose.count("name:worker") > 80
        assert whose.count("name:stolen") > 80


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"max_stream_envs": 3}, "A stream may have 3 environments, got 4; put fewer in a stream"),
        ({"max_client_envs": 4}, "A client may have 4 environments, got 4 more than the 1"),
    ],
)
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_environments_of_a_stream_and_of_a_client_are_limited(
    kind, limits, sentence, tmp_path, caplog
):
    with under_attack(limits=Limits(**limits), listen=[address_of(kind, tmp_path)]) as it:
        with client(it.address, 4):
            wait_until(lambda: sentence in caplog.text)
            it.bystander.plays_on()
            it.wait_for_streams(1)
        with client(it.address, 3):
            it.wait_for_environments(4)
        wait_until(
            lambda: (
                [(c.streams, c.environments, c.refused > 0) for c in it.gateways.clients]
                == [(1, 1, True)]
            )
        )


def test_a_server_that_has_too_many_environments_is_not_played_with(caplog):
    with (
        serving("127.0.0.1:0") as server,
        under_attack(
            server_addresses=[server.server_address], limits=Limits(max_stream_envs=1)
        ) as it,
    ):
        wait_until(lambda: "A stream may have 1 environments, got 2" in caplog.text)
        it.bystander.plays_on()
        it.wait_for_streams(1)


def test_who_is_connected_is_known_by_name(certificates, token):
    honest, stolen = (of_holder(certificates, name, token) for name in ("worker", "stolen"))
    ours = of_holder(certificates, "learner", token, tls_client_certs=True)
    with under_attack(ours, honest) as it:
        with client(it.address, 2, security=stolen):
            it.wait_for_streams(2)
        it.wait_for_streams(1)
        wrong = write_secret(token.token_file.with_name("wrong"), "guessed")
        try_to_play(it.address, dataclasses.replace(stolen, token_file=wrong))

        def figures():
            return {
                c.name: (c.streams, c.environments, c.refused, c.lost) for c in it.gateways.clients
            }

        expected = {"worker": (1, 1, 0, 0), "stolen": (0, 0, 0, 1), NO_TOKEN: (0, 0, 1, 0)}
        wait_until(lambda: figures() == expected)
        assert {c.address for c in it.gateways.clients} == {"ipv4:127.0.0.1"}


@contextlib.contextmanager
def room_for_descriptors(pid, number):
    """Let a process open so many more files, and not one more."""
    used = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = [fd for fd in range(max(used) + number + 2) if fd not in used]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[number], before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("kind", "room"), [("tcp", 1), ("unix", 1), ("unix", 2)])
def test_a_lane_lost_for_want_of_descriptors_shifts_no_other(kind, room, tmp_path, caplog):
    """There is room for the connection, and none for the lane that the learner sends, or to hand
    that lane on.
    """
    caplog.set_level("INFO")
    lost = "The gateway has no descriptor left; wait"
    with under_attack(listen=[address_of(kind, tmp_path)]) as it:
        [pid] = it.gateways.pids
        with contextlib.ExitStack() as later:
            with room_for_descriptors(pid, room):
                later.enter_context(client(it.address, 2))
                wait_until(lambda: lost in caplog.text)
                it.bystander.plays_on()
                it.wait_for_streams(1)
            later.enter_context(client(it.address, 3))
            it.wait_for_environments(6)
            it.wait_for_rollouts(10)
            wait_until(lambda: it.gateways.num_lanes == 3)  # what did not arrive is closed
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 6


def test_what_the_log_says_of_a_peer_is_one_line_of_printable_characters(token, caplog):
    caplog.set_level("INFO")
    name, failure = "evil\nINFO all is well\x1b[2J", "Traceback\n  raised here\n\x07boo\x1b[2J"
    with under_attack(token) as it:
        for message in (encode_failure(failure), b"\xff"):
            talk(it.address, [hello(name=name), FIRST, message], token="secret")
        wait_until(lambda: "raised: ?boo?[2J" in caplog.text)
        wait_until(lambda: "Expected an EnvironmentMessage" in caplog.text)
    lines = [record.getMessage() for record in caplog.records]
    assert any("evil?INFO all is well?[2J joined" in line for line in lines)
    assert [line for line in lines if not line.isprintable()] == []


def test_new_names_of_figures_for_ever_take_neither_memory_nor_places(token):
    """Those in `info`, which would be columns of the logs."""
    options = {"num_actions": NUM_ACTIONS, "security": token}
    frame = np.zeros(3, np.float32)
    with under_attack(token) as it:
        with contextlib.ExitStack() as stack:
            attacker, other = (
                stack.enter_context(torchbeast.connect(it.address, **options)) for _ in range(2)
            )
            attacker.step(frame)
            for i in range(5 * MAX_NAMES):
                attacker.step(frame, done=True, info={f"name {i}": 1.0})
            other.step(frame)
            other.step(frame, done=True, info={"score": 3.0})
            sums = it.pool.take_info()
        assert sums.pop("score") == (3.0, 1)
        assert set(sums) == {f"name {i}" for i in range(MAX_NAMES)}
    stats = RunningStats()
    for i in range(5 * MAX_NAMES):
        stats.add_info({f"name {i}": (1.0, 1)})
    assert len(stats.info_names) == MAX_NAMES


@pytest.mark.slow
def test_streams_of_other_sizes_for_ever_take_no_memory(monkeypatch):
    """Each needs a lane of its own."""
    monkeypatch.setattr("libtorchbeast.actor_pool.MAX_LANES", 4)
    with under_attack(limits=Limits(max_streams=3)) as it:
        source = int(it.bystander.rollouts[0][0]["source"][0, 0])
        for num_envs in range(2, 12):
            with client(it.address, num_envs):
                it.wait_for_streams(2)
            it.wait_for_streams(1)
        assert it.gateways.num_lanes <= 3
        assert len(it.pool._client_of_lane) <= 4
        assert it.pool.client_of(source) == "ipv4:127.0.0.1"


@pytest.mark.parametrize("place", ["gateway", "learner", "actors"])
def test_hosts_without_number_take_no_memory(place, monkeypatch):
    """Whoever has the token and a network of IPv6 is another client at each call."""
    monkeypatch.setattr("libtorchbeast.rpc.connected_clients.MAX_CLIENTS", 3)
    monkeypatch.setattr("libtorchbeast.actor_pool.MAX_LANES", 4)
    if place == "gateway":
        clients = Clients(Limits())
        for i in range(10):
            with clients.playing(Watched(f"ipv4:192.0.2.{i}:1", pytest.fail), Hello("x", 1, None)):
                pass
        assert len(clients.take_news()) == 3
        return
    with under_attack() as it:
        if place == "actors":
            mine = it.pool._clients["ipv4:127.0.0.1"]
            for i in range(10):
                lane = Lane.create(it.gateways.spec, 1)
                lane.client = f"host {i}"
                it.pool.add_lane(lane)
                lane.close()
                del lane
            assert len(it.pool._clients) <= 4
            assert it.pool._clients["ipv4:127.0.0.1"] == mine
            return
        [gateway] = it.gateways._gateways
        for i in range(10):
            news = dataclasses.asdict(ClientFigures(f"host {i}", "x", "", 0.0))
            it.gateways._handle(gateway, {"kind": "client", **news})
        assert len(it.gateways.clients) == 3


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_no_environments_may_compress_where_the_learner_dials(compression, caplog):
    answers = [encode_hello(Hello("evil" + 100 * ".", 1, SPEC)), FIRST]
    fake = fake_end(answers, method=ENVIRONMENTS_METHOD, compression=compression)
    with fake as address, under_attack(server_addresses=[address]) as it:
        wait_until(lambda: "Compression algorithm" in caplog.text)
        it.bystander.plays_on()
        it.wait_for_streams(1)


# ------------------------------------------------------------------------------- on what is learnt


@pytest.mark.slow
def test_huge_frames_and_rewards_end_no_run(tmp_path):
    """As large as the gateway lets through; what is learnt from others is learnt.

    The cost lets the gradient of this small net be infinite, as that of a deep one would be.
    """
    args = ("--env", "CartPole-v1", "--reward_clipping", "none", "--no-normalize_observations",
            "--no-normalize_rewards", "--baseline_cost", "1e12")  # fmt: skip
    over = threading.Event()

    def attack(address):
        numbers = np.random.default_rng(1)
        with torchbeast.connect(address, num_actions=2) as actor:
            while not over.is_set():
                frame = 1e9 * numbers.choice([-1, 1], 4).astype(np.float32)
                actor.step(frame, 1e9 * numbers.choice([-1, 1]), done=bool(numbers.integers(2)))

    with (
        attacked_training(tmp_path, *args) as run,
        run.bystander() as bystander,
    ):
        with run_in_threads(functools.partial(attack, run.address)):
            try:
                run.wait_for(lambda: run.figure("nonfinite_rollouts") > 3)
                bystander.plays_on()
            finally:
                over.set()
        bystander.plays_on()
    weights = torch.load(run.folder / "model.tar", weights_only=True)["model_state_dict"]
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.slow
def test_rollouts_that_are_held_back_are_not_learnt_from(tmp_path):
    """Nor does anybody wait for them."""
    frame = np.zeros(4, np.float32)
    args = ("--env", "CartPole-v1", "--max_policy_lag", "10")
    with (
        attacked_training(tmp_path, *args) as run,
        run.bystander() as bystander,
        torchbeast.connect(run.address, num_actions=2) as attacker,
    ):
        attacker.step(frame)
        bystander.plays_on(200)  # 25 updates
        assert run.figure("dropped_rollouts") == 0
        for _ in range(8):
            attacker.step(frame)
        run.wait_for(lambda: run.figure("dropped_rollouts") >= 1)


@pytest.mark.slow
def test_a_first_client_that_asks_for_too_large_a_model_is_sent_away(tmp_path, monkeypatch):
    """At once and without a model. The next one decides, whoever else asks beside it."""
    monkeypatch.setattr(model_size, "_smallest_memory", lambda: 1 << 30)
    enormous = Spec(ArraySpec("float32", (1 << 20,)), discrete(3))
    greedy = [encode_hello(Hello("greedy", 1, enormous))]
    with attacked_training(tmp_path, "--env", "remote") as run:
        attack = functools.partial(talk, run.address, greedy)
        with grows_by_less_than(100, os.getpid()):
            num_answers, code, text = attack()
        assert (num_answers, code) == (0, "FAILED_PRECONDITION")
        assert "has no model for these environments: a model of " in text
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            attacks = [pool.submit(attack) for _ in range(8)]
            with run.bystander() as bystander:
                ended = [future.result() for future in attacks]
                bystander.plays_on()
                assert "The learner works with" in attack()[2]
        assert {code for _, code, _ in ended} == {"FAILED_PRECONDITION"}
