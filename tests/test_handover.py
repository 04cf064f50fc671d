"""On one machine it is a lane: handed over at a unix socket, where gRPC is welcome, too."""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import psutil
import pytest

import libtorchbeast
import torchbeast
from libtorchbeast.rpc.env_client import EnvironmentClient
from libtorchbeast.rpc.env_server import EnvironmentServer, StreamsBehind
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.simulator import StreamLine
from tests.helpers.certificates import write_secret
from tests.helpers.counting import NUM_ACTIONS, Counting, counting_group
from tests.helpers.remote import check_rollouts, client, learner, serving
from tests.helpers.threads import wait_until
from tests.test_rpc_bad_peers import talk


@contextlib.contextmanager
def byte_relay(path, target):
    """As ssh forwards a socket: bytes get through, descriptors do not."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    pool = ThreadPoolExecutor(32)

    def copy(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(target)
                pool.submit(copy, near, far)
                pool.submit(copy, far, near)

    pool.submit(accept)
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        pool.shutdown(wait=False)


def gateway_cpu_s(it):
    return sum(psutil.Process(it.gateways.pids[0]).cpu_times()[:2])


@pytest.mark.parametrize("dials", ["learner", "environments"])
def test_rows_do_not_go_through_the_gateway(dials, tmp_path):
    address = f"unix:{tmp_path}/socket"
    with contextlib.ExitStack() as stack:
        if dials == "learner":
            stack.enter_context(serving(address))
            it = stack.enter_context(learner(server_addresses=[address]))
        else:
            it = stack.enter_context(learner(listen=[address]))
            stack.enter_context(client(address, 2))
        it.wait_for_environments(2)
        before, steps, start = gateway_cpu_s(it), it.pool.count(), time.monotonic()
        it.wait_for_rollouts(2000)
        assert it.pool.count() - steps >= 7500
        # A message takes it 100 us, and its polling for what is new a little of every second.
        assert gateway_cpu_s(it) - before < 0.2 + 0.02 * (time.monotonic() - start)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 2


def test_where_descriptors_are_lost_they_speak_grpc(tmp_path):
    with (
        serving(f"unix:{tmp_path}/server"),
        byte_relay(f"{tmp_path}/relay", f"{tmp_path}/server"),
        learner(server_addresses=[f"unix:{tmp_path}/relay"]) as it,
    ):
        it.wait_for_environments(2)
        it.wait_for_rollouts(10)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 2
    with (
        learner(listen=[f"unix:{tmp_path}/learner"]) as it,
        byte_relay(f"{tmp_path}/relay2", f"{tmp_path}/learner"),
        client(f"unix:{tmp_path}/relay2"),
    ):
        it.wait_for_environments(1)
        it.wait_for_rollouts(10)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 1


class Stuck(Counting):
    """Hangs at its third step until it is let go."""

    hangs: ClassVar = threading.Event()
    goes_on: ClassVar = threading.Event()

    def step(self, action):
        if self.count == 2:
            self.hangs.set()
            assert self.goes_on.wait(100)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("link", ["stream", "lane"])
def test_a_heartbeat_stops_while_environments_hang_behind_a_unix_socket(
    link, tmp_path, monkeypatch
):
    """Whichever of the two threads steps them: the other must not beat for it."""
    Stuck.hangs.clear(), Stuck.goes_on.clear()
    calls, beats = [], []
    tick_of_lanes = StreamsBehind.tick_of_lanes
    tick_of_streams = StreamsBehind._tick_of_streams

    def count(tick, streams):
        calls.append(tick)
        tick(streams)

    for tick in (tick_of_lanes, tick_of_streams):
        method = functools.partialmethod(lambda streams, tick: count(tick, streams), tick)
        monkeypatch.setattr(StreamsBehind, tick.__name__, method)
    other = tick_of_lanes if link == "stream" else tick_of_streams
    path = f"{tmp_path}/server"
    with contextlib.ExitStack() as stack:
        beat = functools.partial(beats.append, 1)
        stack.enter_context(
            serving(f"unix:{path}", env_class=Stuck, tick=beat, num_streams=1, max_groups=2)
        )
        stack.enter_context(byte_relay(f"{tmp_path}/relay", path))
        relayed = f"unix:{tmp_path}/relay"
        if link == "lane":  # the streams' thread is there, and has nothing to do
            talk(relayed, [b"?"], ENVIRONMENTS_METHOD)
        where = relayed if link == "stream" else f"unix:{path}"
        it = stack.enter_context(learner(server_addresses=[where]))
        stack.callback(Stuck.goes_on.set)
        assert Stuck.hangs.wait(100)
        num_beats, num_calls = len(beats), calls.count(other)
        wait_until(lambda: calls.count(other) >= num_calls + 5)
        # Two were on their way: one that is about to beat, and one for the last step before.
        assert len(beats) <= num_beats + 2
        Stuck.goes_on.set()
        wait_until(lambda: len(beats) >= num_beats + 5)
        it.wait_for_rollouts(3)


def test_who_speaks_grpc_at_a_unix_socket_is_welcome(tmp_path, monkeypatch):
    """As a client in another language does."""
    address = f"unix:{tmp_path}/learner"
    monkeypatch.setattr("libtorchbeast.rpc.simulator.LaneLine", None)  # it would be a TypeError
    with learner(listen=[address]) as it:
        actor = torchbeast.connect(address, num_actions=NUM_ACTIONS)
        actor._takes_lanes = False
        with actor:
            for i in range(9):
                actor.step(np.array([1, i, 0], np.float32), float(i))
            assert isinstance(actor._line, StreamLine)
            wait_until(lambda: len(it.rollouts) == 2)


def test_a_simulator_on_this_machine_gets_a_lane(tmp_path):
    address = f"unix:{tmp_path}/learner"
    with learner(listen=[address]) as it:
        for _ in range(2):
            with torchbeast.connect(address, num_actions=NUM_ACTIONS) as actor:
                for i in range(9):
                    actor.step(np.array([1, i, 0], np.float32), float(i))
                assert not isinstance(actor._line, StreamLine)
        wait_until(lambda: len(it.rollouts) == 4)


@pytest.mark.slow
def test_a_killed_host_leaves_a_padded_rollout_and_a_lane_that_nobody_uses(tmp_path):
    address = f"unix:{tmp_path}/server.0"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torchbeast.polybeast_env", "--num_servers", "1"),
            *("--pipes_basename", f"unix:{tmp_path}/server", "--envs_per_server", "2"),
            *("--env", "tests.helpers.counting:Counting"),
        ]
    )
    try:
        with learner(server_addresses=[address], unroll_length=1000) as it:
            it.wait_for_streams(2)
            wait_until(lambda: it.pool.count() > 100, 60)
            [host] = psutil.Process(process.pid).children()
            os.kill(host.pid, signal.SIGKILL)
            wait_until(lambda: it.pool.counts()["padded_rollouts"] >= 1, 60)
            before = it.pool.count()
            wait_until(lambda: it.pool.count() > before + 100, 60)  # the next host plays
            wait_until(lambda: it.pool.num_actors() == 2, 60)  # the old lanes are closed
    finally:
        process.terminate()
        assert process.wait(15) == 0


def test_a_wrong_token_is_refused_and_the_right_one_is_not(tmp_path, caplog):
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    write_secret(secret, "secret")
    write_secret(wrong, "wrong")
    address = f"unix:{tmp_path}/learner"
    with learner(listen=[address], security=Security(token_file=secret)) as it:
        caplog.set_level("INFO")
        with client(address, security=Security(token_file=wrong)):
            wait_until(lambda: "refused these environments: The token must be" in caplog.text)
        with client(address, security=Security(token_file=secret)):
            it.wait_for_environments(1)


def test_garbage_at_the_sockets_does_no_harm(tmp_path):
    random = np.random.default_rng(1)
    server, listen = f"{tmp_path}/server", f"{tmp_path}/learner"
    garbage = [random.bytes(n) for n in (1, 4, 100, 5000)]
    garbage += [len(t).to_bytes(4, "little") + t for t in (b"{}", b'{"kind": "hello"}')]
    garbage += [b'%c\0\0\0{"kind": "greeting", "version": [], "token": {}}' % 48]
    with (
        serving(f"unix:{server}"),
        learner(listen=[f"unix:{listen}"], server_addresses=[f"unix:{server}"]) as it,
    ):
        it.wait_for_environments(2)
        for path in (server, listen):
            for data in garbage:
                with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
                    peer.connect(path)
                    peer.sendall(data)
        it.wait_for_rollouts(20)
        with client(f"unix:{listen}"):
            it.wait_for_environments(3)
    assert len(check_rollouts(it.rollouts, it.unroll_length)) == 3


def test_a_learner_that_waits_says_for_whom(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("libtorchbeast.rpc.gateway_processes.SAY_S", 0.5)
    monkeypatch.setattr("libtorchbeast.rpc.gateway_processes.SAY_AGAIN_S", 0.5)
    address = f"unix:{tmp_path}/nobody"
    with learner(server_addresses=[address, "127.0.0.1:1"]) as it:
        # A warning, which Python shows also to programs that have not set up logging.
        wait_until(lambda: f"{address} (no such socket)" in caplog.text)
        assert any(f"{address} (no such socket)" in name for name in it.gateways.late())


def serve(address):
    libtorchbeast.Server(OneStep, server_address=address).run()


class OneStep:
    """Old Gym's kind; every episode has one step."""

    def reset(self):
        return np.zeros(3, np.float32)

    def step(self, action):
        return np.ones(3, np.float32), 1.0, True, {}


def test_a_server_forked_from_a_program_with_grpc_threads_works(tmp_path):
    """gRPC skips its fork handlers while other threads are inside it: the child must not use it."""
    address = f"unix:{tmp_path}/server"
    with learner(listen=["127.0.0.1:0"]) as busy, client(busy.address):
        busy.wait_for_environments(1)  # a thread of this process is inside gRPC from here on
        context = multiprocessing.get_context("fork")
        process = context.Process(target=serve, args=(address,), daemon=True)
        process.start()
        queue = libtorchbeast.BatchingQueue(minimum_batch_size=1, maximum_batch_size=1)
        batcher = libtorchbeast.DynamicBatcher(timeout_ms=10)
        pool = libtorchbeast.ActorPool(3, queue, batcher, [address], ())

        def infer():
            for batch in batcher:
                (_, reward, *_), state = batch.get_inputs()
                batch.set_outputs(((reward.int(),), state))

        threads = [threading.Thread(target=f) for f in (pool.run, infer)]
        for thread in threads:
            thread.start()
        try:
            (rows, _), _ = next(queue)
            assert rows[1][1:].tolist() == [[1.0]] * 3
        finally:
            queue.close()
            batcher.close()
            for thread in threads:
                thread.join(30)
            process.terminate()
            process.join(10)


def serve_at_a_port(errors):
    try:
        libtorchbeast.Server(OneStep, "127.0.0.1:0").run()
    except RuntimeError as error:
        errors.put(str(error))


def test_a_server_at_a_port_forked_from_a_program_with_grpc_threads_is_one_sentence():
    """It might hang, which is worse."""
    context = multiprocessing.get_context("fork")
    errors = context.SimpleQueue()
    with learner(listen=["127.0.0.1:0"]) as busy, client(busy.address):
        busy.wait_for_environments(1)
        process = context.Process(target=serve_at_a_port, args=(errors,), daemon=True)
        process.start()
        process.join(60)
        assert process.exitcode == 0
    assert "needed to listen at 127.0.0.1:0; listen at a unix: address, fork before" in errors.get()


def test_a_stop_before_the_run_ends_it_at_once(tmp_path):
    server = EnvironmentServer(lambda _: counting_group(1), f"unix:{tmp_path}/server")
    server.stop()
    server.run()
    dialing = EnvironmentClient([lambda: counting_group(1)], f"unix:{tmp_path}/learner")
    dialing.stop()
    start = time.monotonic()
    dialing.run()
    assert time.monotonic() - start < 5


def test_grpc_is_not_imported_where_lanes_are_used():
    program = (
        "import sys, libtorchbeast\n"
        "libtorchbeast.Server, libtorchbeast.ActorPool, libtorchbeast.Security\n"
        "import libtorchbeast.env_host\n"
        "import libtorchbeast.rpc.env_server, libtorchbeast.rpc.env_client\n"
        "assert not {'grpc', 'google.protobuf'} & set(sys.modules), sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_simulator_that_sends_no_number_is_told_so_before_the_learner_sees_it(tmp_path):
    address = f"unix:{tmp_path}/learner"
    with learner(listen=[address]), torchbeast.connect(address, num_actions=NUM_ACTIONS) as actor:
        actor.step(np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="The observation must be from -1e"):
            actor.step(np.full(3, np.inf, np.float32))
        actor.step(np.ones(3, np.float32))
