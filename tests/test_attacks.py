"""Attacks, each as somebody with bad intentions would make it; who plays beside them goes on."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import threading
from pathlib import Path
from typing import ClassVar

import grpc
import numpy as np
import psutil
import pytest
from gymnasium import spaces

import libtorchbeast
import torchbeast
from libtorchbeast.env_host import ActionCheck, BadAnswer
from libtorchbeast.episode_info import MAX_NAMES
from libtorchbeast.local_socket import JsonSocket
from libtorchbeast.rpc import env_pb2 as pb
from libtorchbeast.rpc.address import Address, dial_unix
from libtorchbeast.rpc.clients import NO_TOKEN, ClientFigures, Clients
from libtorchbeast.rpc.grpc_streams import Watched
from libtorchbeast.rpc.handshake import Greeting, Hello
from libtorchbeast.rpc.limits import Limits, host_of
from libtorchbeast.rpc.messages import (
    ENVIRONMENTS_METHOD,
    encode_failure,
    encode_greeting,
    encode_hello,
)
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import Lane
from libtorchbeast.specs import ArraySpec, spec_of_space
from tests.helpers.attacks import (
    FakeProxy,
    fake_end,
    fake_local_learner,
    silent_streams,
    under_attack,
)
from tests.helpers.certificates import Certificates, write_secret
from tests.helpers.counting import NUM_ACTIONS, Counting, counting_group
from tests.helpers.remote import check_rollouts, client, learner, running, serving
from tests.helpers.threads import run_in_threads, wait_until
from tests.test_rpc_bad_peers import FIRST, SPEC, hello, talk
from tests.test_rpc_security import try_to_play
from torchbeast.core.stats import RunningStats


@pytest.fixture
def token(tmp_path):
    return Security(token_file=write_secret(tmp_path / "token", "secret"))


@pytest.fixture
def proxy(monkeypatch):
    """All that the environment can say about proxies names this one."""
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FakeProxy.running() as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        yield proxy


@pytest.fixture
def soon(monkeypatch):
    """Environments that are refused ask again at once: the length of the pause is not the point."""
    monkeypatch.setattr("libtorchbeast.rpc.env_client.REFUSED_S", 0.05)
    monkeypatch.setattr("libtorchbeast.rpc.env_client.MAX_REFUSED_S", 0.1)


def test_each_line_of_the_docs_table_names_tests_that_are_there():
    tests = Path(__file__).parent
    text = (tests.parent / "docs" / "remote.md").read_text()
    _, _, table = text.partition("| who | what it can do at worst |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    assert len(lines) > 15
    for line in lines:
        named = re.findall(r"`(test_\w+)`(?: \(`(test_\w+\.py)`\))?", line)
        assert named, line
        for name, file in named:
            assert f"def {name}(" in (tests / (file or "test_attacks.py")).read_text(), name


# ------------------------------------------------------------------------------ without the token


def test_a_proxy_of_the_environment_gets_nothing_of_a_loopback_connection(token, proxy):
    with under_attack(token) as it:
        assert try_to_play(it.address, token) == "played"
        by_name = it.address.replace("127.0.0.1", "localhost")
        assert try_to_play(by_name, token) == "played"
    assert proxy.received == []


def test_a_proxy_gets_nothing_when_the_learner_dials(token, proxy):
    with (
        serving("127.0.0.1:0", security=token) as server,
        under_attack(token, server_addresses=[server.server_address]) as it,
    ):
        it.wait_for_environments(3)
    check_rollouts(it.rollouts, it.unroll_length)
    assert proxy.received == []


def test_without_tls_no_token_leaves_the_machine(token):
    insecure = Security(token_file=token.token_file, insecure=True)
    for check in (insecure.check_dialing, insecure.check_listening):
        with pytest.raises(ValueError, match=r"over TLS only, and 192.0.2.7:4242 has none; give"):
            check("192.0.2.7:4242")
        check("127.0.0.1:4242")
        check("unix:/tmp/socket")


def rss_of(pid):
    return psutil.Process(pid).memory_info().rss


@contextlib.contextmanager
def grows_by_less_than(mib, pid):
    """At no moment does a process take so much more memory."""
    before, largest, over = rss_of(pid), [0], threading.Event()

    def watch():
        while not over.wait(0.01):
            largest[0] = max(largest[0], rss_of(pid))

    with run_in_threads(watch):
        try:
            yield
        finally:
            over.set()
    assert largest[0] - before < mib << 20


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_large_messages_without_the_token_take_no_memory(token, compression):
    """They are not read: 640 MiB in 20 streams, or a few KiB that are as large in memory."""
    large = bytes(32 << 20)
    with under_attack(token) as it, grows_by_less_than(128, it.gateways.pids[0]):
        attack = functools.partial(
            talk, it.address, [large], token="guessed", compression=compression
        )
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            attacks = [pool.submit(attack) for _ in range(20)]
            it.bystander.plays_on()
            ended = [future.result() for future in attacks]
    expected = "UNAUTHENTICATED" if compression is None else "UNIMPLEMENTED"
    assert {code for _, code, _ in ended} == {expected}


def test_who_has_no_token_takes_no_place(token):
    limits = Limits(max_streams=2, max_introductions=2, handshake_s=60.0)
    with under_attack(token, limits=limits) as it, silent_streams(it.address, 40) as calls:
        wait_until(lambda: not any(call.is_active() for call in calls))
        assert {call.code().name for call in calls} == {"UNAUTHENTICATED"}
        assert try_to_play(it.address, token) == "played"
        it.bystander.plays_on()


def test_a_network_counts_as_one_host():
    mapped = "ipv6:%5B::ffff:10.0.0.7%5D:5000"
    assert host_of("ipv4:10.0.0.7:4000") == host_of(mapped) == "ipv4:10.0.0.7"
    first = host_of("ipv6:%5B2001:db8:1:2::7%5D:4000")
    assert first == host_of("ipv6:[2001:db8:1:2:aaaa::8]:5000") == "ipv6:2001:db8:1:2::/64"
    assert first != host_of("ipv6:%5B2001:db8:1:3::7%5D:4000")
    assert host_of("unix:") == "unix:"


def test_gateways_are_the_first_that_the_kernel_kills(token):
    with under_attack(token) as it:
        [pid] = it.gateways.pids
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


# --------------------------------------------------------------------------------- with the token


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_nobody_may_compress(token, compression):
    with under_attack(token) as it, grows_by_less_than(48, it.gateways.pids[0]):
        large = bytes(32 << 20)
        ended = talk(it.address, [large], token="secret", compression=compression)
        assert ended[:2] == (0, "UNIMPLEMENTED")


def test_memory_of_large_messages_is_given_back(token):
    with under_attack(token) as it:
        [pid] = it.gateways.pids
        before = rss_of(pid)
        attack = functools.partial(talk, it.address, [bytes(60 << 20)], token="secret")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            ended = [future.result() for future in [pool.submit(attack) for _ in range(8)]]
        assert {code for _, code, _ in ended} == {"RESOURCE_EXHAUSTED"}
        wait_until(lambda: rss_of(pid) - before < 24 << 20, 60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    made = Certificates.make(tmp_path_factory.mktemp("keys"))
    made.command("worker", "stolen")
    made.command("server", "127.0.0.1")
    return made


def of_worker(certificates, name, token):
    return Security(
        tls_ca=certificates.path("ca.pem"), tls_cert=certificates.path(f"{name}.pem"),
        tls_key=certificates.path(f"{name}.key"), token_file=token.token_file,
    )  # fmt: skip


def named(certificates, token):
    """What a learner listens with that knows its clients by their certificates."""
    return dataclasses.replace(of_worker(certificates, "learner", token), tls_client_certs=True)


def test_a_client_with_many_environments_gets_its_share_of_the_learner_and_no_more(
    certificates, token
):
    """With 64 times as many it would have 98 % of every batch; here nobody waits for it."""
    busy = {"batch_size": 8, "update_s": 0.02}  # a learner is, and its queue is always full
    honest = of_worker(certificates, "worker", token)
    with under_attack(named(certificates, token), honest, num_envs=4, **busy) as it:
        with client(it.address, 256, security=of_worker(certificates, "stolen", token)):
            it.wait_for_streams(2)
            it.wait_for_rollouts(256)
            seen = len(it.rollouts)
            it.wait_for_rollouts(800)
        it.bystander.plays_on()
        recent = it.rollouts[seen : seen + 800]
        whose = [it.pool.client_of(int(rows["source"][0, 0])) for rows, _, _ in recent]
        assert set(whose) == {"name:worker", "name:stolen"}
        assert whose.count("name:worker") > 160
        assert whose.count("name:stolen") > 160


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
    honest, stolen = (of_worker(certificates, name, token) for name in ("worker", "stolen"))
    with under_attack(named(certificates, token), honest) as it:
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


def test_a_revoked_worker_is_sent_away_and_stays_away(certificates, token, tmp_path):
    revoked = tmp_path / "revoked"
    revoked.write_text("# nobody yet\n")
    ours = dataclasses.replace(
        of_worker(certificates, "learner", token), tls_client_certs=True, revoked=revoked
    )
    stolen = of_worker(certificates, "stolen", token)
    with under_attack(ours, of_worker(certificates, "worker", token)) as it:
        with client(it.address, security=stolen):
            it.wait_for_streams(2)
            revoked.write_text("stolen\n")
            it.wait_for_streams(1)
        assert "The certificate of stolen is revoked" in try_to_play(it.address, stolen)


def test_a_revoked_learner_is_sent_away_where_environments_listen(certificates, token, tmp_path):
    revoked = tmp_path / "revoked"
    revoked.write_text("# nobody yet\n")
    theirs = dataclasses.replace(
        of_worker(certificates, "127.0.0.1", token), tls_client_certs=True, revoked=revoked
    )
    ours = of_worker(certificates, "learner", token)
    with (
        serving("127.0.0.1:0", security=theirs) as server,
        learner(server_addresses=[server.server_address], security=ours) as it,
    ):
        it.wait_for_streams(1)
        revoked.write_text("learner\n")
        it.wait_for_streams(0)


def test_a_worker_cannot_pose_as_the_learner_where_environments_listen(certificates, token, caplog):
    theirs = dataclasses.replace(of_worker(certificates, "127.0.0.1", token), tls_client_certs=True)
    with serving("127.0.0.1:0", security=theirs) as server:
        address = [server.server_address]
        thief = of_worker(certificates, "stolen", token)
        with learner(server_addresses=address, security=thief) as it:
            wait_until(
                lambda: "stolen is a worker's certificate, and only a learner" in caplog.text
            )
            assert it.gateways.num_streams == 0
        right = of_worker(certificates, "learner", token)
        with learner(server_addresses=address, security=right) as it:
            it.wait_for_rollouts(3)
    check_rollouts(it.rollouts, it.unroll_length)


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
    monkeypatch.setattr("libtorchbeast.rpc.clients.MAX_CLIENTS", 3)
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


# ------------------------------------------------------------------------- a learner that attacks


class Recording(Counting):
    """Keeps the actions that reach it."""

    made: ClassVar[list[int]] = []
    taken: ClassVar[list[int]] = []

    def __init__(self):
        super().__init__()
        self.made.append(self.id)

    def step(self, action):
        self.taken.append(int(action))
        return super().step(action)


@pytest.fixture
def recorded():
    Recording.made.clear()
    Recording.taken.clear()
    return Recording


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_no_learner_may_compress_where_environments_listen(token, compression):
    with (
        serving("127.0.0.1:0", security=token) as server,
        learner(server_addresses=[server.server_address], security=token) as it,
    ):
        it.wait_for_rollouts(1)
        options = {"token": "secret", "compression": compression}
        ended = talk(server.server_address, [bytes(32 << 20)], ENVIRONMENTS_METHOD, **options)
        assert ended[:2] == (0, "UNIMPLEMENTED")
        it.wait_for_rollouts(3)
    check_rollouts(it.rollouts, it.unroll_length)


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
    with contextlib.ExitStack() as stack:
        with fake_end(greeting, compression=compression) as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: end in caplog.text)
            assert (compression is None) == ("Playing" in caplog.text)
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_no_environments_may_compress_where_the_learner_dials(compression, caplog):
    answers = [encode_hello(Hello("evil" + 100 * ".", 1, SPEC)), FIRST]
    fake = fake_end(answers, method=ENVIRONMENTS_METHOD, compression=compression)
    with fake as address, under_attack(server_addresses=[address]) as it:
        wait_until(lambda: "Compression algorithm" in caplog.text)
        it.bystander.plays_on()
        it.wait_for_streams(1)


def address_of(kind, tmp_path):
    return "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket"


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


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_server_makes_no_more_groups_than_it_offers(kind, token, tmp_path, recorded):
    options = {"env_class": recorded, "num_streams": 2, "security": token}
    with serving(address_of(kind, tmp_path), **options) as server:
        with learner(server_addresses=[server.server_address], security=token) as it:
            it.wait_for_streams(2)
            for _ in range(10):
                code, text = greet(server.server_address, Greeting("greedy", "secret"))
                assert code == "UNAVAILABLE"
                assert "has 2 group(s) of environments, and all are in use; wait." in text
            it.wait_for_rollouts(5)
            assert len(recorded.made) == 4, "two groups of two"
        check_rollouts(it.rollouts, it.unroll_length)
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
            wait_until(lambda: "takes 2 streams, and all are in use" in caplog.text)
            it.wait_for_environments(2)
            assert len(recorded.made) == 2
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("bad", [NUM_ACTIONS, -1, 2**62])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_action_outside_the_space_reaches_no_environment_that_listens(
    kind, bad, tmp_path, recorded, caplog
):
    sentence = f"cannot be used: An action must be from 0 to 4, got {bad}."
    with serving(address_of(kind, tmp_path), env_class=recorded) as server:
        address = [server.server_address]
        with learner(server_addresses=address, agent=lambda count: 0 * count + bad):
            wait_until(lambda: sentence in caplog.text)
        assert recorded.taken == []
        with learner(server_addresses=address) as it:
            it.wait_for_rollouts(3)
        check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_action_outside_the_space_reaches_no_environment_that_dials(
    kind, tmp_path, recorded, caplog, soon
):
    sentence = f"An action must be from 0 to {NUM_ACTIONS - 1}, got {NUM_ACTIONS}."
    with contextlib.ExitStack() as stack:
        listen = [address_of(kind, tmp_path)]
        bad = stack.enter_context(learner(listen=listen, agent=lambda count: 0 * count + 5))
        stack.enter_context(client(bad.address, make=lambda: counting_group(1, recorded)))
        wait_until(
            lambda: f"sent what breaks a rule: {sentence}" in caplog.text
        )  # the client's word
        by_learner = "raised: " if kind == "tcp" else "Environments were refused: "
        wait_until(lambda: by_learner + sentence in caplog.text)
        assert recorded.taken == []
        bad.close()
        with learner(listen=[bad.address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]], "the same environment"
        check_rollouts(it.rollouts, it.unroll_length)


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
        ("tcp", [b"\xff" * 9], "Expected an AgentMessage"),
        ("tcp", [encoded(version=99)], "the other version 99.2; update the older one"),
        ("tcp", [encode_greeting(GREETING), b"\xff" * 9], "Expected an AgentMessage"),
        ("tcp", [encode_greeting(GREETING)] * 2, "Expected Actions, got greeting"),
        ("unix", [as_json({"kind": "greeting", "version": []})], "That is no Greeting"),
        ("unix", [as_json({"kind": "greeting", **OTHER_VERSION})], "the other version 99"),
    ],
    ids=["malformed", "version", "malformed_actions", "greets_again", "local", "local_version"],
)
def test_environments_wait_for_a_learner_that_makes_sense(
    kind, answer, why, tmp_path, recorded, caplog, soon
):
    """The process lives on, and so do its environments and their episodes."""
    fake = fake_end(answer) if kind == "tcp" else fake_local_learner(tmp_path, answer)
    with contextlib.ExitStack() as stack:
        with fake as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: why in caplog.text)
            assert f"The learner at {address} sent what breaks a rule: " in caplog.text
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


def test_environments_wait_for_a_learner_that_greets_and_then_refuses(recorded, caplog, soon):
    """Whatever they sent: their process lives on, with all its groups."""
    refused = "refused these environments: No, thank you. Asking again now and then."
    with contextlib.ExitStack() as stack:
        with fake_end([encode_greeting(GREETING)], grpc.StatusCode.INVALID_ARGUMENT) as address:
            make = functools.partial(counting_group, 1, recorded)
            stack.enter_context(client(address, make=make))
            wait_until(lambda: refused in caplog.text)
        with learner(listen=[address]) as it:
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_environments_wait_while_a_wrong_first_client_has_decided(
    kind, tmp_path, recorded, caplog, soon
):
    with contextlib.ExitStack() as stack:
        with learner(listen=[address_of(kind, tmp_path)]) as wrong:
            address = wrong.address
            with torchbeast.connect(address, num_actions=3) as other:
                other.step(np.zeros(2, np.uint8))
                make = functools.partial(counting_group, 1, recorded)
                stack.enter_context(client(address, make=make))
                wait_until(lambda: "refused these environments: The learner works" in caplog.text)
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
    with learner(listen=[address_of(kind, tmp_path)], security=token) as it:
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
            write_secret(mine, "secret")
            it.wait_for_rollouts(3)
        assert recorded.made == [it.rollouts[0][0]["frame"][0, 0, 0]]
    check_rollouts(it.rollouts, it.unroll_length)
