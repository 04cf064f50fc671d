"""Workers, lanes and actor pool together: every transition arrives once, in order and whole."""

import errno
import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

import libtorchbeast
from libtorchbeast.env_workers import Workers, WorkersConfig
from libtorchbeast.rows import Spec
from libtorchbeast.seeding import derive_seed
from libtorchbeast.shared_lanes import CLOSED
from libtorchbeast.specs import ArraySpec
from libtorchbeast.supervisor import HEALTHY_PROGRESS, MAX_FAILURES
from tests.helpers.numbered import FRAME_SIZE, Checker, answer

SPEC = Spec(
    {"id": ArraySpec("int64"), "step": ArraySpec("int32", (FRAME_SIZE,))}, ArraySpec("int64")
)
T = 7
TIMEOUT_S = 100


class System:
    """Workers with numbered environments, an agent that answers them, and a queue of rollouts."""

    def __init__(
        self, factory="NumberedEnvs", num_workers=2, lanes=4, envs=3, spec=SPEC, **options
    ):
        timeout_s = options.pop("env_timeout_s", 60.0)
        self.queue = libtorchbeast.BatchingQueue(
            minimum_batch_size=4, maximum_batch_size=4, maximum_queue_size=8
        )
        self.batcher = libtorchbeast.DynamicBatcher()
        self.pool = libtorchbeast.ActorPool(
            T, self.queue, self.batcher, initial_agent_state=(torch.zeros(1, 1, 1),)
        )
        self.workers = Workers(
            WorkersConfig(
                factory=f"tests.helpers.numbered:{factory}",
                factory_options=options,
                spec=spec,
                num_workers=num_workers,
                num_groups=lanes,
                envs_per_group=envs,
                seed=1,
                env_timeout_s=timeout_s,
            )
        )
        self.supervisor = self.workers.supervisor
        self._agent = threading.Thread(target=self._run_agent)
        self._agent.start()
        for lane in self.workers.lanes:
            self.pool.add_lane(lane)

    def _run_agent(self):
        version = itertools.count()
        for batch in self.batcher:
            batch.set_outputs(answer(*batch.get_inputs(), next(version)))

    def batches(self):
        """Batches as they come, with an eye on the workers."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            self.workers.poll()
            if self.queue.size() >= 4:
                yield next(self.queue)
                deadline = time.monotonic() + TIMEOUT_S
            else:
                time.sleep(0.002)
        raise TimeoutError(f"No batch within {TIMEOUT_S} s.")

    def healthy_workers(self):
        """Processes in the middle of their steps."""
        return [
            child.process.pid
            for child in self.supervisor.children
            if child.process is not None
            and child.progress() > child._progress_at_failure + HEALTHY_PROGRESS
        ]

    def close(self):
        self.queue.close()
        self.batcher.close()
        self.pool.run()
        self.workers.close()
        self._agent.join(10)
        assert not self._agent.is_alive()


@contextmanager
def running(*args, **options):
    system = System(*args, **options)
    try:
        yield system
    finally:
        system.close()


def threads_and_descriptors():
    gc.collect()  # what other tests left to be collected
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def assert_no_more_than(before):
    """Fewer, if something of an earlier test has gone meanwhile."""
    after = threads_and_descriptors()
    assert all(a <= b for a, b in zip(after, before, strict=True)), (after, before)


@pytest.mark.parametrize(
    ("num_workers", "lanes", "envs"),
    [
        pytest.param(1, 1, 1, marks=pytest.mark.slow),
        (2, 4, 3),
        pytest.param(3, 5, 2, marks=pytest.mark.slow),
    ],
)
def test_every_transition_arrives_once_and_in_order(num_workers, lanes, envs):
    before = threads_and_descriptors()
    with running(num_workers=num_workers, lanes=lanes, envs=envs) as system:
        checker = Checker(T)
        for batch in itertools.islice(system.batches(), 150):
            checker.check(batch)
        pids = system.supervisor.pids
        assert checker.num_transitions == 150 * 4 * T
        assert checker.num_padded == 0
        assert system.pool.count() >= checker.num_transitions
    del system, batch  # the lanes' memory goes with their last view
    gc.collect()
    assert_no_more_than(before)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_hundred_kills_corrupt_nothing_and_stop_nobody(caplog):
    caplog.set_level(logging.CRITICAL, "torchbeast")
    chance = random.Random(5)
    with running(num_workers=4, lanes=8, envs=2) as system:
        checker = Checker(T)
        batches = system.batches()
        checker.check(next(batches))
        before, killed, kill_at = threads_and_descriptors(), set(), 0.0
        while len(killed) < 100:
            checker.check(next(batches))
            victims = [pid for pid in system.healthy_workers() if pid not in killed]
            if time.monotonic() >= kill_at and victims:
                victim = chance.choice(victims)
                os.kill(victim, 9)
                killed.add(victim)
                kill_at = time.monotonic() + chance.uniform(0.0, 0.3)
        transitions = checker.num_transitions
        while len(system.supervisor.pids) < 4:
            checker.check(next(batches))
        for batch in itertools.islice(batches, 100):
            checker.check(batch)
        assert checker.num_transitions >= transitions + 50 * 4 * T
        assert checker.num_padded > 0
        assert system.supervisor.num_restarts == 100
        assert_no_more_than(before)


def test_an_exception_is_logged_once_and_the_environments_are_rebuilt(caplog):
    with running("BreakingEnvs", 1, 1, 4, break_at=40, how="raise") as system:
        restarts, num_rows = 0, 0
        for (rows, _), _ in itertools.islice(system.batches(), 60):
            frame, done = rows["frame"], rows["done"]
            fresh = rows["truncated"][1:].numpy()
            changed = (frame["id"][1:] != frame["id"][:-1]).numpy()
            assert (changed == fresh).all()  # the transition into new environments did not happen
            assert done[1:].numpy()[fresh].all()
            assert (frame["step"][1:, :, 0].numpy()[fresh] == 0).all()
            restarts += fresh.sum()
            num_rows += fresh.size
        assert restarts == pytest.approx(num_rows / 41, rel=0.2)
        assert system.supervisor.num_restarts == 0  # the process lives on
    assert caplog.text.count("Traceback") == 1


@pytest.mark.parametrize(
    ("how", "what"),
    [("exit", "exit code 3"), pytest.param("hang", "has done nothing", marks=pytest.mark.slow)],
)
def test_a_worker_that_ends_or_hangs_is_replaced(how, what, caplog):
    options = {"break_at": 300, "how": how, "env_timeout_s": 5.0}
    with running("BreakingEnvs", 2, 2, 4, **options) as system:
        checker = Checker(T)
        for batch in system.batches():
            checker.check(batch)
            if checker.num_padded and system.supervisor.num_restarts >= 2:
                break
        for batch in itertools.islice(system.batches(), 20):
            checker.check(batch)
    assert what in caplog.text


@pytest.mark.slow
def test_a_worker_that_makes_one_group_after_the_other_does_not_hang():
    with running(num_workers=1, lanes=4, envs=1, build_s=1.5, env_timeout_s=4.0) as system:
        next(system.batches())
        assert system.supervisor.num_restarts == 0


@pytest.mark.slow
def test_workers_that_wait_for_the_learner_do_not_hang(caplog):
    with running() as system:
        checker = Checker(T)
        for batch in system.batches():
            checker.check(batch)
            if len(system.healthy_workers()) == 2:
                break
        system.supervisor.timeout_s = 0.6
        end = time.monotonic() + 2.5  # all that time nobody takes a rollout
        while time.monotonic() < end:
            system.workers.poll()
            time.sleep(0.05)
        for batch in itertools.islice(system.batches(), 20):
            checker.check(batch)
        assert system.supervisor.num_restarts == 0
    assert not caplog.text


def test_what_an_environment_started_ends_with_its_worker(tmp_path):
    marker = tmp_path / "pid"
    with running("StartingEnvs", 1, 1, 1, marker=str(marker)) as system:
        next(system.batches())
        child = psutil.Process(int(marker.read_text()))
        os.kill(system.supervisor.pids[0], 9)
        while system.supervisor.num_restarts == 0:
            next(system.batches())
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone


def test_a_pool_that_is_dropped_while_its_actors_wait_ends_them():
    system = System(num_workers=1, lanes=1, envs=1)
    next(system.batches())
    lane = system.workers.lanes[0]
    pool, system.pool = system.pool, None
    del pool  # with the interpreter lock in hand, and an actor that lets go of tensors
    assert lane.turn.state == CLOSED
    system.pool = libtorchbeast.ActorPool(T, system.queue, system.batcher, initial_agent_state=())
    system.close()


def test_a_forked_child_lets_go_of_pool_and_queues_and_does_no_harm():
    """Its copies come without the threads that they belong to."""
    with running() as system:
        checker = Checker(T)
        checker.check(next(system.batches()))
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a child that hangs is ended by it
            del system.pool, system.queue, system.batcher
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for batch in itertools.islice(system.batches(), 20):
            checker.check(batch)


def test_the_first_state_reaches_the_learner_as_memory_of_its_own():
    """The initial state is one row for all environments; the learner may write to its own."""
    with running(num_workers=1, lanes=1, envs=4) as system:
        _, (state,) = next(system.batches())
        assert state.shape == (1, 4, 1)
        assert state.is_contiguous()
        state += 1
        assert (state == 1).all()


@pytest.mark.slow
def test_a_worker_that_never_works_is_given_up_and_the_last_one_ends_the_run(caplog):
    with (
        running("BreakingEnvs", 1, 1, 1, break_at=2, how="raise") as system,
        pytest.raises(RuntimeError, match=r"out of tea(.|\n)*Every worker has failed"),
    ):
        for _ in system.batches():
            pass
    assert f"giving it up after {MAX_FAILURES} failures in a row" in caplog.text


def test_a_worker_starts_fast_stays_small_and_imports_no_torch():
    start = time.monotonic()
    with running(num_workers=1, lanes=1, envs=1) as system:
        next(system.batches())
        assert time.monotonic() - start < 20  # a second on a machine that is not busy
        (pid,) = system.supervisor.pids
        process = psutil.Process(pid)
        assert process.memory_info().rss < 150e6
        assert not any("libtorch_" in mapping.path for mapping in process.memory_maps())


@pytest.mark.slow
def test_specs_that_do_not_fit_are_refused_with_a_sentence(caplog):
    system = System(num_workers=1, lanes=1, envs=1, spec=Spec({"id": ArraySpec("int64")}))
    try:
        with pytest.raises(RuntimeError, match="Every worker has failed"):
            for _ in system.batches():
                pass
    finally:
        system.close()


@pytest.mark.parametrize(("num_workers", "lanes"), [(2, 4), (2, 5), (3, 4)])
def test_seeds_differ_between_groups_and_starts_and_runs(monkeypatch, num_workers, lanes):
    seeds = []

    def start(module, config, fds, catch_output, data):
        seeds.extend(derive_seed(config["seed"], i) for i in range(config["num_groups"]))
        raise OSError("enough")

    monkeypatch.setattr("libtorchbeast.env_workers.Helper", start)
    for seed in (1, 2):
        workers = Workers(WorkersConfig("", {}, SPEC, num_workers, lanes, 3, seed))
        for child, num_starts in itertools.product(workers.supervisor.children, range(2)):
            with pytest.raises(OSError, match="enough"):
                child.start(num_starts)
        workers.close()
    assert len(set(seeds)) == len(seeds) == 4 * lanes


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_tried_again_with_growing_pauses(monkeypatch, caplog):
    with running(num_workers=1, lanes=1, envs=1) as system:
        popen = subprocess.Popen
        failures = iter([errno.EAGAIN, errno.ENOMEM, errno.EMFILE])

        def fail(*args, **options):
            number = next(failures, None)
            if number is None:
                return popen(*args, **options)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(subprocess, "Popen", fail)
        next(system.batches())
        assert next(failures, None) is None
        assert system.supervisor.num_restarts == 0  # none of it was the worker's fault
    assert caplog.text.count("cannot be started") == 3
