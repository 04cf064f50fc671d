"""Gateways: rows arrive exactly, whoever comes, goes or is killed, and nothing is left behind."""

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import gymnasium
import numpy as np
import psutil
import pytest

import libtorchbeast
import torchbeast
from libtorchbeast import shared_memory
from libtorchbeast.rows import EpisodeCounter, Spec
from libtorchbeast.rpc.dialing import LearnerFinished, LearnerGone
from libtorchbeast.rpc.gateway_config import GatewaysConfig
from libtorchbeast.rpc.gateway_processes import Gateways
from libtorchbeast.rpc.handshake import Hello, Refused
from libtorchbeast.rpc.lane_grants import GatewayLanes, LaneGrants
from libtorchbeast.rpc.limits import Limits
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD, encode_hello
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.step_messages import encode_step
from libtorchbeast.specs import INT64, ArraySpec, discrete
from tests.helpers import masked
from tests.helpers.attacks import silent_streams
from tests.helpers.certificates import write_secret
from tests.helpers.counting import NUM_ACTIONS, Counting, Shifted, counting_group, next_action
from tests.helpers.remote import check_rollouts, client, learner, running, serving
from tests.helpers.threads import wait_until

COUNTING = Spec(ArraySpec("float32", (3,)), discrete(NUM_ACTIONS))


def connect(it, **options):
    return torchbeast.connect(it.address, **{"num_actions": NUM_ACTIONS, **options})


@pytest.mark.parametrize("num_envs", [1, 3])
def test_environments_that_dial_in_have_every_transition_learnt_once(num_envs):
    with learner(listen=["127.0.0.1:0"]) as it:
        with client(it.address, num_envs):
            it.wait_for_environments(num_envs)
            it.wait_for_rollouts(10 * num_envs)
        it.wait_for_streams(0)
    transitions = check_rollouts(it.rollouts, it.unroll_length)
    assert len(transitions) == num_envs
    assert it.gateways.spec == COUNTING


@pytest.mark.parametrize("link", ["stream", "dialled stream", "lane", "Server"])
def test_actions_that_do_not_begin_at_0_are_shifted_on_every_link(tmp_path, link):
    with contextlib.ExitStack() as stack:
        if link in ("stream", "lane"):
            where = "127.0.0.1:0" if link == "stream" else f"unix:{tmp_path}/learner"
            it = stack.enter_context(learner(listen=[where]))
            stack.enter_context(client(it.address, make=lambda: counting_group(1, Shifted)))
        else:
            address = "127.0.0.1:0" if link == "dialled stream" else f"unix:{tmp_path}/server"
            program = (
                stack.enter_context(serving(address, env_class=Shifted))
                if link == "dialled stream"
                else stack.enter_context(running(libtorchbeast.Server(Shifted, address)))
            )
            it = stack.enter_context(learner(server_addresses=[program.server_address]))
        it.wait_for_rollouts(10)
    assert check_rollouts(it.rollouts, it.unroll_length)
    assert it.gateways.spec.num_actions == NUM_ACTIONS


def first_possible(row):
    return row["frame"]["action_mask"].long().argmax(-1)


@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix:{}/server"])
@pytest.mark.parametrize("place", masked.PLACES)
def test_a_server_shows_masks_wherever_they_come_from(tmp_path, where, place):
    """They are different at every step, so that the agent must have the right one."""
    server = libtorchbeast.Server(
        lambda: masked.Masked(place=place, end="truncated"), where.format(tmp_path)
    )
    with running(server):
        wait_until(lambda: not server.server_address.endswith(":0"))
        options = {"agent": first_possible, "looks_at_rows": True}
        with learner(server_addresses=[server.server_address], **options) as it:
            it.wait_for_rollouts(10)
    assert it.gateways.spec.observation["action_mask"] == ArraySpec("bool", (5,))
    for rows, _, _ in it.rollouts:
        # None was rebuilt, which an action that is masked leads to: only time limits end episodes.
        assert (rows["episode_step"][1:, 0][rows["truncated"][1:, 0]] == 4).all()
    assert len(it.rollouts) >= 10


@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix:{}/learner"])
def test_a_simulator_says_its_spaces_and_gets_actions_of_them(tmp_path, where):
    board = gymnasium.spaces.Box(0, 1, (3,), np.uint8)
    options = {"num_actions": 0, "observation_space": board}
    options["action_space"] = gymnasium.spaces.Discrete(NUM_ACTIONS, start=3)
    with learner(listen=[where.format(tmp_path)]) as it, connect(it, **options) as actor:
        actions = [actor.step(np.array([0, count, 0], np.uint8)) for count in (0, 1, 1)]
        assert it.gateways.spec == Spec(ArraySpec("uint8", (3,), 0, 1), discrete(NUM_ACTIONS))
    assert actions == [3 + next_action(count) for count in (0, 1, 1)]


def test_environments_that_listen_have_every_transition_learnt_once(tmp_path):
    address = f"unix:{tmp_path}/server"
    # The learner is there before the server.
    with learner(server_addresses=[address, address]) as it, serving(address, max_groups=2):
        it.wait_for_environments(4)
        it.wait_for_rollouts(20)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 4


def test_a_server_gets_as_many_streams_as_it_asks_for(tmp_path):
    address = f"unix:{tmp_path}/server"
    num_environments = 0
    with learner(server_addresses=[address]) as it:
        for num_streams in (3, 1, 2):
            num_environments += 2 * num_streams
            with serving(address, num_streams=num_streams):
                it.wait_for_environments(num_environments)
                it.wait_for_streams(num_streams)
            it.wait_for_streams(0)
        wait_until(
            lambda: it.pool.num_actors() == 0
        )  # lanes that were handed over are not used again
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == num_environments


@pytest.mark.slow
def test_many_clients_come_and_go_and_lanes_are_used_again():
    with learner(listen=["127.0.0.1:0"]) as it:
        for number in range(3):
            with client(it.address), client(it.address):
                it.wait_for_environments(2 * (number + 1))
            it.wait_for_streams(0)
        assert it.pool.num_actors() == 2
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 6


def test_partial_rollout_is_padded_when_a_client_leaves():
    with learner(listen=["127.0.0.1:0"], unroll_length=50) as it:
        with connect(it) as actor:
            env = Counting()
            action = actor.step(env.reset()[0].astype(np.float32))
            for _ in range(3):
                frame, reward, done, _, _ = env.step(action)
                action = actor.step(frame, reward, done)
        wait_until(lambda: len(it.rollouts) == 1)
    [(rows, _, _)] = it.rollouts
    assert rows["truncated"][:, 0].tolist() == [False] * 4 + [True] * 47
    assert rows["done"][:, 0].tolist() == [True] + [False] * 3 + [True] * 47
    assert check_rollouts(it.rollouts, 50) == {env.id: 3}


@pytest.mark.parametrize("place", ["unix", "port"])
def test_a_rollout_says_which_environment_it_is_of(place, tmp_path):
    listen = "127.0.0.1:0" if place == "port" else f"unix:{tmp_path}/learner"
    with learner(listen=[listen], unroll_length=1) as it:
        for name in ("first", "second"):
            with connect(it, name=name) as actor:
                for _ in range(2):
                    actor.step(np.zeros(3, np.float32))
                wait_until(lambda: len(it.rollouts) > 0)
                (rows, _, _), it.rollouts = it.rollouts[0], []
                whose = it.pool.name_source(int(rows["source"][0, 0]))
                peer = "unix:" if place == "unix" else "ipv4:127.0.0.1:"
                assert whose.startswith(f"environment 0 of {name} at {peer}")
        assert it.pool.name_source(99 << 32) == "environment 0 of lane 99"


def test_a_time_limit_sends_the_true_end_and_an_extra_row():
    with learner(listen=["127.0.0.1:0"], unroll_length=3) as it, connect(it) as actor:
        frame = np.zeros(3, np.float32)
        actor.step(frame)
        actor.step(frame + 1, 1.0)
        actor.step(frame + 9, 2.0, done=True, final_observation=frame + 2)
        wait_until(lambda: len(it.rollouts) == 1)
    rows = it.rollouts[0][0]
    assert rows["frame"][:, 0, 0].tolist() == [0, 1, 2, 9]
    assert rows["reward"][:, 0].tolist() == [0, 1, 2, 0]
    assert rows["done"][:, 0].tolist() == [True, False, False, True]
    assert rows["truncated"][:, 0].tolist() == [False, False, False, True]
    assert rows["episode_step"][:, 0].tolist() == [0, 1, 2, 2]
    assert rows["episode_return"][:, 0].tolist() == [0, 1, 3, 3]


def start_environments(*args):
    command = [sys.executable, "-m", "torchbeast.polybeast_env", *args]
    return subprocess.Popen([*command, "--env", "tests.helpers.counting:Counting"])


@pytest.mark.slow
def test_kill_9_of_client_gateway_and_server_loses_no_exactness(tmp_path):
    base = f"unix:{tmp_path}/server"
    dialing = None
    serving = start_environments("--pipes_basename", base, "--num_servers", "1",
                                 "--envs_per_server", "2")  # fmt: skip
    try:
        with learner(listen=["127.0.0.1:0"], server_addresses=[f"{base}.0"]) as it:
            dialing = start_environments("--connect", it.address, "--num_servers", "1",
                                         "--envs_per_server", "3")  # fmt: skip
            it.wait_for_environments(5)
            for parent, num_seen in ((dialing, 8), (serving, 10)):
                [victim] = psutil.Process(parent.pid).children()
                os.kill(victim.pid, signal.SIGKILL)
                it.wait_for_environments(num_seen)
            os.kill(it.gateways.pids[0], signal.SIGKILL)
            it.wait_for_environments(12)  # a client keeps its own, a server makes new ones
            it.wait_for_streams(3)
            it.wait_for_rollouts(20)
            assert it.gateways.supervisor.num_restarts == 1
            assert it.pool.num_actors() == 3
        assert serving.poll() is None
        assert dialing.poll() is None
    finally:
        for process in filter(None, (serving, dialing)):
            process.send_signal(signal.SIGTERM)
        for process in filter(None, (serving, dialing)):
            assert process.wait(15) == 0
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 12
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_gateway_that_hangs_is_restarted(monkeypatch):
    monkeypatch.setattr("libtorchbeast.rpc.gateway_processes.HANG_S", 3.0)
    with learner(listen=["127.0.0.1:0"]) as it:
        os.kill(it.gateways.pids[0], signal.SIGSTOP)
        wait_until(lambda: it.gateways.supervisor.num_restarts == 1)
        with client(it.address):
            it.wait_for_environments(1)


def test_who_left_with_its_gateway_is_no_longer_connected():
    with learner(listen=["127.0.0.1:0"]) as it:
        with client(it.address, 2):
            wait_until(lambda: [c.environments for c in it.gateways.clients] == [2])
            os.kill(it.gateways.pids[0], signal.SIGSTOP)  # so that it cannot say who leaves
        os.kill(it.gateways.pids[0], signal.SIGKILL)
        wait_until(lambda: it.gateways.supervisor.num_restarts == 1)
        assert [(c.streams, c.environments) for c in it.gateways.clients] == [(0, 0)]


@pytest.mark.slow
def test_nothing_is_left_behind():
    def play():
        with learner(listen=["127.0.0.1:0"]) as it:
            with connect(it) as actor:
                actor.step(np.zeros(3, np.float32))
            return it.gateways.pids

    def state():
        gc.collect()
        me = psutil.Process()
        return len(me.children()), me.num_fds(), threading.active_count()

    play()  # grpc keeps some things for good
    before = state()
    [pid] = play()
    wait_until(lambda: all(a <= b for a, b in zip(state(), before, strict=True)))
    assert not psutil.pid_exists(pid)


def test_a_gateway_dies_with_its_parent():
    program = (
        "import os\n"
        "from libtorchbeast.rpc.gateway_config import GatewaysConfig\n"
        "from libtorchbeast.rpc.gateway_processes import Gateways\n"
        "gateways = Gateways(GatewaysConfig(listen=['127.0.0.1:0']))\n"
        "gateways.open()\n"
        "print(gateways.pids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    wait_until(lambda: not psutil.pid_exists(int(run.stdout)), 10)


def test_the_first_environments_decide_and_others_are_told_what_was_expected():
    with learner(listen=["127.0.0.1:0"]) as it:
        with connect(it) as actor:
            actor.step(np.zeros(3, np.float32))
        expected = r"observations float32\[3\], these environments have uint8\[2\]"
        with connect(it) as actor, pytest.raises(Refused, match=expected):
            actor.step(np.zeros(2, np.uint8))
        expected = "works with 5 actions, these environments have 4"
        with connect(it, num_actions=4) as actor, pytest.raises(Refused, match=expected):
            actor.step(np.zeros(3, np.float32))


def test_the_spec_is_known_before_the_lanes_are(tmp_path):
    gateways = Gateways(GatewaysConfig(listen=["127.0.0.1:0"]))
    gateways.open()
    try:
        with pytest.raises(TimeoutError, match="No environments introduced themselves"):
            gateways.wait_for_spec(0.1)
        with client(gateways.listening[0]):
            assert gateways.wait_for_spec(20) == COUNTING
            assert gateways.num_streams == 0
    finally:
        gateways.close()


def test_several_gateways_share_a_port():
    with learner(listen=["127.0.0.1:0"], num_gateways=2) as it:
        assert len(it.gateways.pids) == 2
        with client(it.address), client(it.address), client(it.address):
            it.wait_for_environments(3)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 3


def test_a_port_in_use_is_reported_at_the_start():
    first = Gateways(GatewaysConfig(listen=["127.0.0.1:0"]))
    first.open()
    try:
        with pytest.raises(OSError, match=r"Cannot listen at 127\.0\.0\.1:\d+"):
            Gateways(GatewaysConfig(listen=first.listening)).open()
    finally:
        first.close()


@pytest.mark.slow
def test_streams_of_any_size_find_lanes_however_few_there_may_be():
    with learner(listen=["127.0.0.1:0"], limits=Limits(max_streams=2)) as it:
        gateway = psutil.Process(it.gateways.pids[0])

        def num_fds():
            return psutil.Process().num_fds() + gateway.num_fds()

        most = 0
        for i, num_envs in enumerate((1, 2, 3, 1, 2, 3, 1, 2, 3)):
            with client(it.address, num_envs), client(it.address, num_envs):
                it.wait_for_streams(2)
                it.wait_for_rollouts(4 * num_envs)
            it.wait_for_streams(0)
            if i < 3:
                most = max(most, num_fds())
            # Nothing stays of lanes that made place; connections take a moment to close.
            wait_until(lambda most=most: num_fds() <= most)
        os.kill(it.gateways.pids[0], signal.SIGKILL)  # the lanes of the dead are nobody's
        wait_until(lambda: it.gateways.supervisor.num_restarts == 1)
        with client(it.address, 4), client(it.address, 4):
            it.wait_for_streams(2)
            it.wait_for_rollouts(16)
        wait_until(lambda: it.pool.num_actors() <= 2)
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kind", ["port", "socket"])
@pytest.mark.parametrize("finished", [True, False])
def test_simulators_hear_that_training_is_finished(tmp_path, kind, finished):
    """And else that the learner has gone, and may come back."""
    address = "127.0.0.1:0" if kind == "port" else f"unix:{tmp_path}/learner"
    with learner(listen=[address]) as it, connect(it, reconnect_s=0.0) as actor:
        for i in range(20):
            actor.step(np.array([1, i, 0], np.float32))
        if finished:
            it.gateways.finish()
        it.close()
        it.close = lambda: None  # for the context
        with pytest.raises(LearnerGone) as raised:
            actor.step(np.zeros(3, np.float32))
        assert isinstance(raised.value, LearnerFinished) == finished


def test_a_simulator_without_a_learner_says_that_it_waits(tmp_path, caplog):
    address = f"unix:{tmp_path}/learner"
    actor = torchbeast.connect(address, num_actions=3, reconnect_s=1.0)
    with actor, pytest.raises(LearnerGone):
        actor.step(np.zeros(3, np.float32))
    (record,) = caplog.records  # and not one for each call
    assert record.levelname == "WARNING"
    assert f"Waiting for a learner at {address}, for up to 1 s: " in record.getMessage()


def test_environments_whose_rollouts_would_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr("libtorchbeast.rpc.lane_grants.memory_bytes", lambda: 500)
    expected = "1 more environments would take too much of the learner's memory"
    with (
        learner(listen=["127.0.0.1:0"], rows_per_rollout=5) as it,
        connect(it, reconnect_s=0.0) as actor,
        pytest.raises(LearnerGone, match=expected),
    ):
        actor.step(np.zeros(3, np.float32))


def test_a_learner_without_room_for_a_lane_turns_environments_away_and_goes_on(caplog):
    with learner(listen=["127.0.0.1:0"]) as it:
        add_lane = it.gateways._grants.add_lane
        it.gateways.start(no_thread_is_left)
        with client(it.address):
            wait_until(lambda: "there is no lane for them: no thread is left" in caplog.text)
            it.gateways.start(add_lane)
            it.wait_for_environments(1)


def no_thread_is_left(lane):
    raise RuntimeError("no thread is left")


@pytest.mark.slow
def test_environments_that_take_long_to_make_are_waited_for(tmp_path):
    limits = Limits(handshake_s=0.5)
    address = f"unix:{tmp_path}/server"
    with learner(server_addresses=[address], limits=limits) as it, serving(address, build_s=2.0):
        it.wait_for_environments(2)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 2  # and made once


def test_a_server_that_refuses_is_told_with_its_reason(tmp_path, caplog):
    token = tmp_path / "token"
    write_secret(token, "secret")
    address = f"unix:{tmp_path}/server"
    with learner(server_addresses=[address]), serving(address, security=Security(token_file=token)):
        wait_until(lambda: "cannot be used: The token must be this end's" in caplog.text)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_socket_is_not_called(tmp_path, caplog):
    address = f"unix:{tmp_path}/server"
    with serving(address):
        wait_until((tmp_path / "server").exists)
        os.chown(tmp_path / "server", 12345, 12345)
        with learner(server_addresses=[address]) as it:
            wait_until(lambda: "belongs to another user, so it is not dialled" in caplog.text)
            assert it.gateways.num_streams == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_learner_is_not_told_the_token(tmp_path):
    address = f"unix:{tmp_path}/learner"
    with learner(listen=[address]) as it:
        os.chown(tmp_path / "learner", 12345, 12345)
        with (
            connect(it, reconnect_s=0.0) as actor,
            pytest.raises(LearnerGone, match="belongs to another user, so it is not dialled"),
        ):
            actor.step(np.zeros(3, np.float32))


def test_silent_peers_take_no_places_of_environments_that_listen(tmp_path):
    address = f"unix:{tmp_path}/server"
    limits = Limits(max_streams=2, max_introductions=2, handshake_s=60.0)
    with serving(address, limits=limits, max_groups=3):
        wait_until((tmp_path / "server").exists)
        with (
            silent_streams(address, 5, ENVIRONMENTS_METHOD) as calls,
            learner(server_addresses=[address, address, address]) as it,
        ):
            wait_until(lambda: sum(not call.is_active() for call in calls) >= 3)
            it.wait_for_environments(4)
            it.wait_for_streams(2)  # a third is refused


def test_how_a_server_ended_the_call_is_told_though_the_agent_was_thinking(tmp_path, caplog):
    """The learner writes its actions to a call that is over already."""
    address = f"unix:{tmp_path}/server"

    def play(requests, context):
        assert started.wait(30)
        next(requests)
        yield encode_hello(Hello("mine", 1, COUNTING))
        yield encode_step(EpisodeCounter(1).first_row(np.zeros((1, 3), np.float32)))
        wait_until(lambda: it.batcher.size() == 0 and it.pool.num_actors() == 1)
        context.add_callback(over.set)
        context.abort(grpc.StatusCode.INTERNAL, "the simulator crashed")

    over, started = threading.Event(), threading.Event()
    service, method = ENVIRONMENTS_METHOD
    handler = grpc.method_handlers_generic_handler(
        service, {method: grpc.stream_stream_rpc_method_handler(play)}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(address)
    server.start()
    try:
        with learner(server_addresses=[address], hold=True) as it:
            started.set()
            assert over.wait(30)
            it.thinks.clear()
            wait_until(lambda: "cannot be used: the simulator crashed" in caplog.text)
    finally:
        server.stop(0)


def test_environments_that_no_model_fits_are_sent_away_and_others_may_come():
    def check(spec):
        if spec.num_actions == 0:
            raise Refused("FAILED_PRECONDITION", "how many actions?")

    with learner(listen=["127.0.0.1:0"], check_first=check) as it:
        with connect(it, num_actions=0) as actor, pytest.raises(Refused, match="how many actions"):
            actor.step(np.zeros(2, np.float32))
        assert it.gateways.spec is None
        with connect(it) as actor:
            actor.step(np.zeros(3, np.float32))
        assert it.gateways.spec is not None


class Spoilt(Counting):
    """The second of them sends a number once that no learner takes."""

    num_made = 0

    def __init__(self):
        super().__init__()
        Spoilt.num_made += 1
        self.is_second = Spoilt.num_made == 2

    def _observe(self, action):
        is_bad = self.is_second and self.count == 15
        return super()._observe(action) * np.float32(1e12 if is_bad else 1)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_environment_with_a_number_beyond_1e9_is_rebuilt_alone(kind, tmp_path, caplog):
    """On every link: its neighbours keep their episodes, and the stream goes on."""
    Spoilt.num_made = 0
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/learner"
    make = functools.partial(counting_group, 2, Spoilt)
    with learner(listen=[address]) as it, client(it.address, make=make):
        it.wait_for_environments(3)
        it.wait_for_rollouts(4)
        it.wait_for_streams(1)
    assert Spoilt.num_made == 3
    assert "must be from -1e+09 to 1e+09, got " in caplog.text
    assert "refused" not in caplog.text


def test_memory_of_a_container_is_less_than_the_machines(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(shared_memory, "CONTAINER_MEMORY", [tmp_path / "nothing", limit])
    installed = shared_memory.memory_bytes()
    limit.write_text("max\n")
    assert shared_memory.memory_bytes() == installed
    limit.write_text(f"{1 << 20}\n")
    assert shared_memory.memory_bytes() == 1 << 20


def test_a_gateway_takes_as_many_streams_as_it_may():
    limits = Limits(max_streams=1)
    with learner(listen=["127.0.0.1:0"], limits=limits) as it, client(it.address):
        it.wait_for_streams(1)
        expected = "takes 1 streams, and all are in use|may have no place left"
        with (
            connect(it, reconnect_s=0.0) as actor,
            pytest.raises(LearnerGone, match=expected),
        ):
            actor.step(np.zeros(3, np.float32))


def test_who_comes_later_does_not_change_the_action_that_is_known():
    frame = ArraySpec("float32", (3,))
    for known, later, kept in (
        (ArraySpec("float32", (1,), -1.0, 1.0), ArraySpec("float32", (1,), -5.0, 5.0), "known"),
        (ArraySpec("int64", (2,), 0, 2, True), ArraySpec("int64", (2,), 0, 4, True), "known"),
        (ArraySpec("int64", (), 0, 9), discrete(5), "known"),
        (INT64, discrete(5), "later"),
    ):
        grants = LaneGrants(GatewaysConfig(), Spec(frame, known), None, [])
        sent = []
        grants.add_request(
            GatewayLanes(wakeup_fd=-1), {"spec": Spec(frame, later).to_json()}, sent.append
        )
        assert not sent
        assert grants.spec.action == (known if kept == "known" else later)
