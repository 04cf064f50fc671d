"""`Server` and `ActorPool` with addresses: what code written for TorchBeast relies on."""

import contextlib
import multiprocessing
import os
import stat
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import numpy as np
import pytest
import torch

import libtorchbeast
from libtorchbeast.grpc_forks import GrpcForks
from libtorchbeast.rpc.address import dial_unix, listen_unix
from libtorchbeast.rpc.messages import ENVIRONMENTS_METHOD
from libtorchbeast.sync_envs import SyncEnvs
from tests.helpers.remote import running
from tests.helpers.threads import wait_until
from tests.test_rpc_bad_peers import talk

UNROLL_LENGTH = 4


class OldStyle:
    """Episodes of three steps; reset and step as Gym had them, and an observation in pieces."""

    def __init__(self):
        self.num_steps = 0

    def reset(self):
        self.num_steps = 0
        return self.observe(0)

    def step(self, action):
        self.num_steps += 1
        return self.observe(action), 0.5, self.num_steps == 3, {}

    def observe(self, action):
        backwards = np.arange(12, dtype=np.int16).reshape(3, 4).T[::-1]  # not contiguous
        return {"blstats": backwards, "pair": (np.int64(action), np.full(2, self.num_steps, bool))}


class Failing(OldStyle):
    def step(self, action):
        raise RuntimeError("the dungeon collapsed")


class Limited(gymnasium.Env):
    """Gymnasium's style: a time limit after two steps."""

    observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.full(1, self.time, np.float32), 1.0, False, self.time == 2, {}


class Offers(Limited):
    """Has a mask of actions that allows all of them."""

    def action_masks(self):
        return np.ones(5, bool)


def serve(env_class, address):
    libtorchbeast.Server(lambda: env_class(), server_address=address).run()


@contextlib.contextmanager
def serving(env_class, address, method="fork"):
    """As published code does it: forked, daemonic, with a lambda."""
    context = multiprocessing.get_context(method)
    process = context.Process(target=serve, args=(env_class, address), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(10)


class Run:
    """An ActorPool in a thread, an agent with a state that counts, and the learner's batches."""

    def __init__(self, addresses):
        self.queue = libtorchbeast.BatchingQueue(
            batch_dim=1, minimum_batch_size=1, maximum_batch_size=1, maximum_queue_size=2
        )
        self.batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=10)
        self.pool = libtorchbeast.ActorPool(
            unroll_length=UNROLL_LENGTH,
            learner_queue=self.queue,
            inference_batcher=self.batcher,
            env_server_addresses=addresses,
            initial_agent_state=(torch.zeros(1, 1, 2),),
        )
        self.error = None
        self.threads = [threading.Thread(target=f) for f in (self._run, self._infer)]
        for thread in self.threads:
            thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):
            self.queue.close()
        self.batcher.close()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()

    def _run(self):
        try:
            self.pool.run()
        except Exception as error:
            self.error = error

    def _infer(self):
        for batch in self.batcher:
            (_, reward, _, episode_step, _), (state,) = batch.get_inputs()
            assert reward.shape[0] == 1
            action = episode_step.long() + 1
            batch.set_outputs(((action, torch.ones(*action.shape, 5)), (state + 1,)))


def test_masks_beside_observations_do_not_reach_learners_for_torchbeast(tmp_path):
    address = f"unix:{tmp_path}/masked"
    with serving(Offers, address), Run([address]) as run:
        ((frame, *_), _), _ = next(run.queue)
    assert frame.shape == (UNROLL_LENGTH + 1, 1, 1)


def test_rollouts_have_the_shape_that_torchbeast_had(tmp_path):
    address = f"unix:{tmp_path}/old"
    with serving(OldStyle, address), Run([address]) as run:
        batches = [next(run.queue) for _ in range(3)]
        count = run.pool.count()
    last = None
    for i, ((env_outputs, agent_outputs), (state,)) in enumerate(batches):
        frame, reward, done, episode_step, episode_return = env_outputs
        assert reward.shape == (UNROLL_LENGTH + 1, 1)
        assert state.shape == (1, 1, 2)
        assert (state == UNROLL_LENGTH * i).all()
        expected = torch.arange(12, dtype=torch.int16).reshape(3, 4).T.flip(0)
        assert (frame["blstats"] == expected).all()
        assert agent_outputs[1].shape == (UNROLL_LENGTH + 1, 1, 5)
        assert (done == (episode_step % 3 == 0)).all()
        assert (episode_return == 0.5 * episode_step).all()
        assert (frame["pair"][0] == torch.where(done, 0, agent_outputs[0])).all()
        assert frame["pair"][1].dtype == torch.bool
        if last is not None:
            assert torch.equal(frame["pair"][0][0], last[0]["pair"][0][-1])
            assert torch.equal(episode_step[0], last[3][-1])
        last = env_outputs
    assert batches[0][0][0][2][0, 0]  # the first row of all is done
    assert count >= 3 * UNROLL_LENGTH


def test_each_stream_has_an_environment_of_its_own(tmp_path):
    address = f"unix:{tmp_path}/old"
    with serving(OldStyle, address), Run([address] * 3) as run:
        for _ in range(12):
            (rows, _), _ = next(run.queue)
            assert ((rows[3][1:] - rows[3][:-1] == 1) | (rows[3][1:] == 1)).all()
        assert run.pool.num_actors() == 3


def test_an_exception_in_an_environment_reaches_the_learner_with_its_text(tmp_path):
    address = f"unix:{tmp_path}/failing"
    with serving(Failing, address), Run([address]) as run:
        wait_until(lambda: run.error is not None)
    assert isinstance(run.error, RuntimeError)
    assert "the dungeon collapsed" in str(run.error)
    assert "Traceback" in str(run.error)


class NotANumber(Limited):
    def step(self, action):
        frame, *rest = super().step(action)
        return np.full_like(frame, np.nan), *rest


def test_an_observation_that_is_not_finite_is_an_exception_on_a_lane_too(tmp_path):
    address = f"unix:{tmp_path}/nan"
    with serving(NotANumber, address), Run([address]) as run:
        wait_until(lambda: run.error is not None)
    assert isinstance(run.error, RuntimeError)
    assert "The observation must be from -1e+09 to 1e+09, got nan from environment 0" in str(
        run.error
    )


@pytest.mark.slow
def test_the_learner_may_come_first_and_a_server_may_come_back(tmp_path):
    address = f"unix:{tmp_path}/late"
    with Run([address]) as run:
        # No fork while another thread may be starting a gateway.
        with serving(OldStyle, address, "spawn") as server:
            next(run.queue)
            server.kill()
            server.join(10)
        before = run.pool.count()
        with serving(OldStyle, address, "spawn"):
            wait_until(lambda: run.queue.size() > 0 or run.pool.count() > before)
            next(run.queue)
    assert run.error is None


def test_without_truncation_a_time_limit_is_an_end_like_any_other(tmp_path):
    address = f"unix:{tmp_path}/limited"
    with serving(Limited, address), Run([address]) as run:
        (rows, _), _ = next(run.queue)
    frame, _, done, episode_step, _ = rows
    assert done[:, 0].tolist() == [True, False, True, False, True]
    assert frame[:, 0, 0].tolist() == [0, 1, 0, 1, 0]
    assert episode_step[:, 0].tolist() == [0, 1, 2, 1, 2]


def test_with_truncation_a_time_limit_has_its_true_end_and_an_extra_row():
    env = SyncEnvs(Limited, 1)
    rows = [env.reset()] + [env.step(np.zeros(1, np.int64)) for _ in range(4)]
    assert [row["frame"][0, 0] for row in rows] == [0, 1, 2, 0, 1]
    assert [bool(row["done"][0]) for row in rows] == [True, False, False, True, False]
    assert [bool(row["truncated"][0]) for row in rows] == [False, False, False, True, False]
    assert [int(row["episode_step"][0]) for row in rows] == [0, 1, 2, 2, 1]
    assert [float(row["episode_return"][0]) for row in rows] == [0, 1, 2, 2, 1]


def test_run_serves_until_stop_and_the_socket_is_the_owners(tmp_path):
    path = tmp_path / "server"
    server = libtorchbeast.Server(OldStyle, f"unix:{path}")
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(path.exists)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    start = time.monotonic()
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - start < 5
    assert not path.exists()


def test_where_a_fork_may_not_use_grpc_who_speaks_it_leaves_nothing_behind(
    tmp_path, monkeypatch, caplog
):
    address, temporary = f"unix:{tmp_path}/server", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(GrpcForks, "is_child_of_grpc", True)
    with running(libtorchbeast.Server(OldStyle, address)):
        wait_until((tmp_path / "server").exists)
        assert talk(address, [b""], ENVIRONMENTS_METHOD)[:2] == (0, "UNAVAILABLE")
        wait_until(lambda: "Clients that speak gRPC are refused at" in caplog.text)
        assert list(temporary.iterdir()) == []
    assert f"so that only lanes work at {address}; dial it with a learner of this" in caplog.text
    assert "listen at a unix: address" not in caplog.text


def test_the_default_address_is_torchbeasts():
    assert libtorchbeast.Server(OldStyle).server_address == "unix:/tmp/polybeast"


def test_a_socket_somebody_listens_at_is_not_taken_away(tmp_path):
    address = f"unix:{tmp_path}/server"
    server = libtorchbeast.Server(OldStyle, address)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until((tmp_path / "server").exists)
    with pytest.raises(OSError, match="another process listens there"):
        libtorchbeast.Server(OldStyle, address).run()
    server.stop()
    thread.join(10)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="it is a file"):
        libtorchbeast.Server(OldStyle, f"unix:{tmp_path}/file").run()
    assert (tmp_path / "file").read_text() == "precious"


def test_of_many_who_want_a_socket_at_once_one_has_it(tmp_path):
    """None takes it away from who has bound it and does not listen yet."""
    before = os.umask(0o22)
    try:
        for number in range(50):
            address, start = f"unix:{tmp_path}/{number}", threading.Barrier(4)

            def listen(address=address, start=start):
                start.wait(60)
                try:
                    return listen_unix(address)
                except OSError as error:
                    return str(error)

            with ThreadPoolExecutor(4) as pool:
                tries = [pool.submit(listen) for _ in range(4)]
                refusals = [said for job in tries if isinstance(said := job.result(), str)]
                [listener] = [job.result() for job in tries if job.result() not in refusals]
            assert len(refusals) == 3
            assert all("another process listens there" in said for said in refusals)
            dial_unix(f"{tmp_path}/{number}").close()
            listener.close()
        assert len(list(tmp_path.iterdir())) == 50  # no other names are left
    finally:
        os.umask(before)  # which they may have taken for each other's
