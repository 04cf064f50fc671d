"""Batches that follow the number of environments, so that policy lag stays within its target."""

import dataclasses
import json
import queue as queues
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.training import (
    ROOT,
    TIMEOUT_S,
    RemoteActors,
    RemoteEnvironments,
    Training,
    newest_figures,
    read_logs,
    run,
)
from torchbeast import monobeast, polybeast, polybeast_learner
from torchbeast.errors import UsageError
from torchbeast.run import batch_size as module
from torchbeast.run import model_size
from torchbeast.run.batch_size import (
    BatchSize,
    Groups,
    LagNotice,
    choose_batch_size,
    needed_batch,
)
from torchbeast.run.command_line import parse
from torchbeast.run.remote_actor_offer import ROLLOUTS_AHEAD

libtorchbeast = pytest.importorskip("libtorchbeast")

FLAGS = polybeast_learner.Flags()
LIMIT_S = 60.0


# --- The rule ---------------------------------------------------------------------------------


def lag_bound(batch_size, num_ahead, queue_size, num_learner_threads):
    """The most updates between acting and learning, as docs/architecture.md counts them."""
    ahead = num_ahead + max(queue_size, batch_size)
    return ahead // batch_size + 2 * num_learner_threads - 1


@given(
    threads=st.integers(1, 4),
    more=st.integers(0, 40),
    ahead=st.integers(0, 5000),
    queue_size=st.integers(-100, 3000),
)
def test_a_batch_is_the_smallest_that_keeps_lag_within_the_target(threads, more, ahead, queue_size):
    target = 2 * threads + more
    needed = needed_batch(target, ahead, queue_size, threads)
    assert lag_bound(needed, ahead, queue_size, threads) <= target
    assert needed == 1 or lag_bound(needed - 1, ahead, queue_size, threads) > target


@pytest.mark.parametrize(
    ("num_envs", "group", "batch_size"),
    [(8, 8, 8), (48, 8, 8), (80, 8, 11), (136, 4, 19), (520, 4, 70), (1024, 8, 137)],
)
def test_batches_grow_with_environments_but_not_on_two_cores(num_envs, group, batch_size):
    flags = dataclasses.replace(FLAGS, num_learner_threads=1)
    assert choose_batch_size(flags, Groups([num_envs], group, group)) == batch_size


def test_a_batch_has_a_place_for_each_environment_if_actors_wait():
    flags = dataclasses.replace(FLAGS, hold_actors=True, batch_size=32)
    for num_envs in (8, 32, 500):
        assert choose_batch_size(flags, Groups([num_envs])) == max(32, num_envs)


def test_without_a_target_a_batch_stays_as_it_is():
    for hold in (True, False):
        flags = dataclasses.replace(FLAGS, target_policy_lag=None, hold_actors=hold)
        assert choose_batch_size(flags, Groups([1000])) == 8


def test_the_largest_client_has_the_share_that_it_needs():
    """Equal clients are as good as one; beside smaller ones it needs a larger batch."""
    flags = dataclasses.replace(FLAGS, num_learner_threads=1)
    assert choose_batch_size(flags, Groups([8] * 128, 8, 8)) == 137
    share = 2 * 989 / 15
    assert choose_batch_size(flags, Groups([35, 989], 8, 8)) == int(35 + share) + 1


def test_rollouts_on_their_way_count_as_further_environments():
    flags = dataclasses.replace(FLAGS, num_learner_threads=1)
    assert choose_batch_size(flags, Groups([256], 8, 8)) == 35
    assert choose_batch_size(flags, Groups([256], 8, 8, in_flight=4)) == 137
    assert choose_batch_size(flags, Groups([8] * 32, 8, 8, in_flight=4)) == 137
    share = 4 * 2 * 200 / 15
    assert choose_batch_size(flags, Groups([56, 200], 8, 8, 4)) == int(56 + share) + 1
    held = dataclasses.replace(flags, hold_actors=True)
    assert choose_batch_size(held, Groups([256], 8, 8)) == 256


@pytest.mark.parametrize("beast", [monobeast, polybeast_learner])
def test_a_target_that_no_batch_can_keep_is_refused(beast):
    flags = beast.Flags(env="Catch", target_policy_lag=3, num_learner_threads=2)
    with pytest.raises(UsageError, match="target_policy_lag must be at least 4, twice"):
        flags.validate()
    dataclasses.replace(flags, target_policy_lag=4).validate()
    dataclasses.replace(flags, hold_actors=True).validate()


# --- The flags --------------------------------------------------------------------------------


@pytest.mark.parametrize("beast", [monobeast, polybeast, polybeast_learner])
def test_a_given_batch_size_is_kept(beast):
    assert parse(beast.Flags, ["--env", "Mock"]).target_policy_lag == 16
    assert parse(beast.Flags, ["--env", "Mock", "--batch_size", "8"]).target_policy_lag is None
    both = ["--env", "Mock", "--batch_size", "4", "--target_policy_lag", "20"]
    flags = parse(beast.Flags, both)
    assert (flags.batch_size, flags.target_policy_lag) == (4, 20)


def test_monobeasts_batch_and_memory_are_what_its_environments_need():
    flags = monobeast.Flags(num_actors=2, num_learner_threads=2)
    assert (flags.effective_batch_size, flags.num_slots) == (8, 2 * 16 + 8)
    many = dataclasses.replace(flags, num_actors=64)
    ahead = 3 * 512 - 8 - 1
    assert lag_bound(many.effective_batch_size, ahead, 0, 2) == many.target_policy_lag
    assert many.num_slots == 2 * 512 + many.effective_batch_size
    held = dataclasses.replace(many, hold_actors=True)
    assert held.effective_batch_size == 512
    fixed = dataclasses.replace(many, target_policy_lag=None)
    assert fixed.effective_batch_size == 8
    roomy = dataclasses.replace(flags, num_buffers=400)
    assert lag_bound(roomy.effective_batch_size, 16 - 8 - 1, 400, 2) <= 16
    assert roomy.effective_batch_size > 8


PRETEND = """
import json, os, sys
def look(num_cores):
    os.sched_getaffinity = lambda _: set(range(num_cores))
    for name in [name for name in sys.modules if name.startswith("torchbeast")]:
        del sys.modules[name]
    from torchbeast import monobeast, polybeast
    from torchbeast.run.batch_size import Groups, choose_batch_size
    poly, mono = polybeast.Flags(num_learner_threads=1), monobeast.Flags()
    num_envs = poly.num_groups * poly.envs_per_actor
    groups = Groups([num_envs], poly.envs_per_actor, poly.envs_per_actor)
    return (poly.num_servers, poly.num_inference_threads, num_envs,
            choose_batch_size(poly, groups), mono.num_envs, mono.effective_batch_size)
print(json.dumps({num_cores: look(num_cores) for num_cores in (2, 4, 16, 64)}))
"""


@pytest.mark.slow
def test_the_defaults_grow_with_the_cores():
    """Workers, inference threads, environments and batch; MonoBeast's environments and batch."""
    program = [sys.executable, "-c", PRETEND]
    result = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "2": [3, 1, 48, 8, 16, 8],
        "4": [5, 1, 80, 11, 32, 8],
        "16": [17, 2, 136, 19, 128, 29],
        "64": [65, 8, 520, 70, 512, 118],
    }


# --- Following the environments ---------------------------------------------------------------


class FakeQueue:
    """A learner's queue with these groups of environments: (client, environments) each."""

    def __init__(self, members=()):
        self.members_now = list(members)
        self.waiting = 0
        self.sizes = []

    def members(self):
        return self.members_now

    def size(self):
        return self.waiting

    def resize(self, minimum, maximum, queue_size):
        assert minimum == maximum
        self.sizes.append((maximum, queue_size))


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 0.0)


def test_batches_follow_environments_that_join_and_leave(at_once, caplog):
    caplog.set_level("INFO")
    size = BatchSize(FLAGS, num_expected=0)
    assert (size.batch_size, size.queue_size) == (8, 8)
    queue = FakeQueue([(0, 8)])
    size.poll(queue)
    assert queue.sizes == []
    assert not caplog.text
    queue.members_now += [(1, 8)] * 127
    size.poll(queue)
    large = size.batch_size
    assert queue.sizes == [(large, large)]
    assert f"Updates learn from {large} rollouts at a time with 1024 environments" in caplog.text
    assert "--learning_rate stays 0.0006" in caplog.text
    queue.members_now, queue.waiting = [(0, 8)], 40
    size.poll(queue)
    assert queue.sizes[-1] == (40, 40)  # not smaller than what waits
    queue.waiting = 3
    size.poll(queue)
    assert queue.sizes[-1] == (8, 8)
    assert "Updates learn from 8 rollouts at a time with 8 environments" in caplog.text
    queue.members_now = []
    size.poll(queue)
    assert queue.sizes[-1] == (8, 8)


def test_batches_have_their_size_before_a_runs_own_environments_have_come(at_once):
    flags = polybeast.Flags(num_actors=128, envs_per_actor=8)
    size = BatchSize(flags, num_expected=1024)
    large, queue = size.batch_size, FakeQueue([(0, 8)] * 100)
    assert large == choose_batch_size(flags, Groups([1024], 8, 8))
    size.poll(queue)
    assert size.batch_size == large
    queue.members_now = [(0, 8)] * 128
    size.poll(queue)
    queue.members_now = [(0, 8)] * 64
    size.poll(queue)
    assert size.batch_size == choose_batch_size(flags, Groups([512], 8, 8)) < large


def test_batches_grow_while_there_are_actors_that_carry_the_model():
    size, queue = BatchSize(FLAGS, num_expected=0), FakeQueue([(0, 64)] * 2)
    size.poll(queue)
    small = size.batch_size
    size.poll(queue, in_flight=4)
    assert size.batch_size == choose_batch_size(FLAGS, Groups([128], 64, 64, 4)) > 3 * small
    size.poll(queue)
    assert size.batch_size == small


def test_small_changes_are_followed_and_not_logged_each_time(at_once, caplog):
    caplog.set_level("INFO")
    size, queue = BatchSize(FLAGS, num_expected=0), FakeQueue()
    for num_groups in (128, 127, 126, 128, 127):
        queue.members_now = [(0, 8)] * num_groups
        size.poll(queue)
    assert len(queue.sizes) == 5
    assert caplog.text.count("Updates learn from") == 1


def test_batches_grow_to_what_fits_the_memory_and_say_so(at_once, caplog):
    queue = FakeQueue([(1, 100_000)])
    for most, largest in [(50, 50), (10**6, module.MAX_BATCH_SIZE)]:
        caplog.clear()
        BatchSize(FLAGS, num_expected=0, most=most).poll(queue)
        assert queue.sizes[-1] == (largest, largest)
        assert "the most that batches grow to" in caplog.text
    large = dataclasses.replace(FLAGS, batch_size=4096)
    assert BatchSize(large, num_expected=10**6, most=50).batch_size == 4096


def test_memory_is_for_so_many_rollouts(monkeypatch):
    monkeypatch.setattr(model_size, "_smallest_memory", lambda: 16 << 30)
    assert 100 < model_size.most_rollouts(21 * 4 * 84 * 84) < 200
    assert model_size.most_rollouts(1 << 40) == 1


def test_a_queue_without_room_stays_one(at_once):
    flags = dataclasses.replace(FLAGS, hold_actors=True)
    size, queue = BatchSize(flags, num_expected=0), FakeQueue([(0, 64)])
    size.poll(queue)
    assert queue.sizes == [(64, 0)]


@pytest.mark.parametrize(("num_envs", "is_logged"), [(48, False), (520, True)])
def test_rollouts_that_will_be_old_are_logged(caplog, num_envs, is_logged):
    flags = dataclasses.replace(FLAGS, target_policy_lag=None)
    size = BatchSize(flags, num_expected=0)
    for _ in range(2):
        size.poll(FakeQueue([(0, num_envs - 1), (1, 1)]))
    assert caplog.text.count("rollouts are about 65 updates old") == is_logged


def test_a_target_that_is_asked_for_is_no_reason_for_a_warning(caplog):
    flags = dataclasses.replace(FLAGS, target_policy_lag=100)
    LagNotice(flags).poll(80 * 8, 8)
    LagNotice(flags).poll(20 * 8, 8, in_flight=4)
    assert not caplog.text
    LagNotice(flags).poll(101 * 8, 8)
    assert "rollouts are about 101 updates old" in caplog.text


# --- The bound, on the real queue -------------------------------------------------------------


class Lockstep:
    """Environments that play in no time and a learner that is always late: the oldest rollouts
    that there can be. The learner waits until everybody waits for it.

    With more than one rollout in flight they are actors that carry the model: all but one are on
    their way or played, and weights are those that were new when the rollout before was begun.
    """

    def __init__(self, num_envs, batch_size, in_flight=1):
        self.queue = libtorchbeast.BatchingQueue(
            batch_dim=0,
            minimum_batch_size=batch_size,
            maximum_batch_size=batch_size,
            maximum_queue_size=batch_size,
        )
        self.version = 0
        self._queue_size = batch_size
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._is_late = in_flight > 1
        self._num_begun = 0
        self._most_begun = num_envs * max(1, in_flight - 1)
        self._num_envs = num_envs
        self._threads = []
        for _ in range(num_envs):
            on_their_way, may_begin = queues.Queue(), threading.Semaphore(max(1, in_flight - 1))
            for target in (self._play, self._send):
                thread = threading.Thread(target=target, args=(on_their_way, may_begin))
                self._threads.append(thread)
                thread.start()

    def _play(self, on_their_way, may_begin):
        before = self.version
        while may_begin.acquire() and not self.queue.is_closed():
            newest = self.version
            with self._lock:
                self._num_begun += 1
            on_their_way.put(torch.tensor([before if self._is_late else newest]))
            before = newest
        on_their_way.put(None)

    def _send(self, on_their_way, may_begin):
        while (rollout := on_their_way.get()) is not None:
            with self._lock:
                self._num_waiting += 1
            try:
                self.queue.enqueue(rollout)
            except libtorchbeast.ClosedBatchingQueue:
                may_begin.release()
                continue
            with self._lock:
                self._num_waiting -= 1
                self._num_begun -= 1
            may_begin.release()

    def _is_quiet(self):
        with self._lock:
            now = (self._num_waiting, self._num_begun)
        all_wait = now == (self._num_envs, self._most_begun)
        return all_wait and self.queue.size() >= self._queue_size

    def resize(self, batch_size):
        self._queue_size = batch_size
        self.queue.resize(batch_size, batch_size, batch_size)

    def learn(self, num_updates):
        """Returns the largest lag of these updates."""
        lags = []
        for _ in range(num_updates):
            deadline = time.monotonic() + LIMIT_S
            while not self._is_quiet():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            lags.append(int((self.version - next(self.queue)).max()))
            self.version += 1
        return max(lags)

    def close(self):
        self.queue.close()
        for thread in self._threads:
            thread.join(LIMIT_S)


def test_no_rollout_is_older_than_the_bound_says():
    num_envs, target = 60, 8
    batch_size = needed_batch(target, 2 * num_envs - 2, 0, 1)
    lockstep = Lockstep(num_envs, batch_size)
    try:
        largest = lockstep.learn(50)
        assert num_envs // batch_size <= largest <= target
        lockstep.resize(4)
        assert lockstep.learn(50) > target  # it is the size that does it
        lockstep.resize(batch_size)
        lockstep.learn(num_envs // batch_size + 2)  # what is older still
        assert lockstep.learn(20) <= target
    finally:
        lockstep.close()


def test_no_rollout_of_an_actor_that_carries_the_model_is_older_than_the_bound_says():
    num_envs, target, in_flight = 24, 8, ROLLOUTS_AHEAD + 2
    batch_size = needed_batch(target, in_flight * 2 * num_envs - 2, 0, 1)
    lockstep = Lockstep(num_envs, batch_size, in_flight)
    try:
        assert in_flight * num_envs // batch_size <= lockstep.learn(50) <= target
        lockstep.resize(needed_batch(target, 2 * num_envs - 2, 0, 1))
        assert lockstep.learn(50) > target  # what is on its way must be counted
    finally:
        lockstep.close()


# --- Real runs --------------------------------------------------------------------------------

SMALL_STEPS = ("--env", "Catch", "--no-hold_actors", "--num_passes", "1", "--num_minibatches", "1",
               "--unroll_length", "20", "--clip_ratio", "None")  # fmt: skip


def usual_lag(folder, smallest_batch=1):
    """Of updates from so many rollouts; a process that the system stops for a moment is older."""
    rows = [row for row in read_logs(folder) if row["batch_size"] and row["policy_lag"]]
    large = [row for row in rows if float(row["batch_size"]) >= smallest_batch]
    return statistics.median(float(row["policy_lag"]) for row in large)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize(("beast", "num_envs"), [("polybeast", 1024), ("monobeast", 256)])
def test_many_environments_are_learnt_from_in_time(tmp_path, beast, num_envs):
    args = ("--num_actors", "4", "--envs_per_actor", str(num_envs // 4), "--target_policy_lag", "8")
    args += ("--total_steps", "200000", "--log_interval_s", "0.5", "--xpid", "run")
    result = run(beast, tmp_path, *SMALL_STEPS, *args)
    assert result.returncode == 0, result.stderr
    size = re.search(r"Updates learn from (\d+) rollouts at a time", result.stdout + result.stderr)
    assert size
    assert int(size[1]) > num_envs / 8
    figures = newest_figures(tmp_path / "run")
    assert float(figures["batch_size"]) == int(size[1])
    assert 0 < usual_lag(tmp_path / "run") <= 8


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_clients_that_join_and_leave_do_not_make_rollouts_old(tmp_path):
    """From 8 environments to 264 and back."""
    address = f"unix:{tmp_path}/learner"
    args = (*SMALL_STEPS, "--total_steps", "100000000", "--batch_size", "8")
    args += ("--target_policy_lag", "16", "--listen", address)

    def size():
        return float(newest_figures(training.folder).get("batch_size", 0))

    with Training("polybeast_learner", tmp_path, *args) as training:
        training.wait_for(lambda: "dial in at" in training.output, "address")
        where = ("--env", "Catch", "--connect", address, "--num_servers", "1")
        (tmp_path / "more").mkdir()
        with RemoteEnvironments(tmp_path, *where, "--envs_per_server", "8"):
            training.wait_for_step(1)
            training.wait_for(lambda: size() == 8, "small batches")
            with RemoteEnvironments(tmp_path / "more", *where, "--envs_per_server", "256") as more:
                training.wait_for(lambda: size() >= 264 / 8, "large batches")
                training.wait_for_step(training.step + 20_000)
                assert more.end(signal.SIGTERM) == 0
            training.wait_for(lambda: size() == 8, "small batches again")
            training.wait_for_step(training.step + 2_000)
            assert training.end(signal.SIGTERM) == 0
    assert 0 < usual_lag(training.folder, 264 / 8) <= 16


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_actors_that_carry_the_model_are_learnt_from_in_time(tmp_path):
    """Batches that count what plays alone would be 37, and the lag 15."""
    address = f"unix:{tmp_path}/learner"
    args = (*SMALL_STEPS, "--total_steps", "100000000", "--batch_size", "8")
    args += ("--target_policy_lag", "8", "--listen", address)
    dial = ("--env", "Catch", "--connect", address, "--num_actors", "2", "--envs_per_actor", "64")
    with (
        Training("polybeast_learner", tmp_path, *args) as training,
        RemoteActors(tmp_path, *dial, cwd=ROOT) as actors,
    ):
        training.wait_for_step(1)
        training.wait_for(
            lambda: float(newest_figures(training.folder).get("batch_size", 0)) >= 128, "batches"
        )
        training.wait_for_step(training.step + 200_000)
        assert training.end(signal.SIGTERM) == 0
        assert actors.end(signal.SIGTERM) == 0
    assert 0 < usual_lag(training.folder, 128) <= 8
