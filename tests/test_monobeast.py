"""MonoBeast as its users run it: it learns, it resumes, and what breaks is restarted and logged."""

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.helpers import training
from tests.helpers.default_flags import default_flags
from tests.helpers.training import ROOT, TIMEOUT_S, final_return, fragile, read_logs, shared_memory
from torchbeast import monobeast
from torchbeast.runtime.shared_tensors import shared_zeros

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]

run = functools.partial(training.run, "monobeast")
Training = functools.partial(training.Training, "monobeast")

SMALL = ("--env", "Catch", "--total_steps", "100000000")


# --- It learns --------------------------------------------------------------------------------


def train(tmp_path, *args):
    result = run(tmp_path, "--xpid", "run", *args, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return final_return(tmp_path / "run")


def test_catch_is_learnt_and_leaves_its_files_and_can_be_tested(tmp_path):
    total = 100_000
    assert train(tmp_path, "--env", "Catch", "--total_steps", str(total)) > 0.9
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model.tar", "logs.csv", "fields.csv", "out.log", "meta.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is True
    rows = read_logs(tmp_path / "run")
    flags = default_flags(monobeast.Flags, "Catch")
    assert total <= int(rows[-1]["step"]) < total + flags.batch_size * flags.unroll_length

    test = run(tmp_path, "--mode", "test", "--num_episodes", "5")  # the latest, its environment
    assert test.returncode == 0, test.stderr
    assert re.search(r"Mean return over 5 episodes: 1\.00", test.stdout), test.stdout

    again = run(tmp_path, "--env", "Catch", "--xpid", "run", "--total_steps", str(total))
    assert again.returncode == 0
    assert f"is trained for {total:,} steps; raise --total_steps" in again.stdout
    wrong = run(tmp_path, "--mode", "test", "--env", "CartPole-v1")
    assert wrong.returncode == 2
    assert "was trained on Catch and does not fit CartPole-v1" in wrong.stderr


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_other_ways_to_start_actors_work(tmp_path, start_method):
    before = shared_memory()
    result = run(
        tmp_path,
        *("--env", "Catch", "--total_steps", "5000", "--start_method", start_method),
        *("--num_actors", "3", "--envs_per_actor", "2", "--batch_size", "5"),
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert shared_memory() == before


# --- Rollouts are exact -----------------------------------------------------------------------


def test_rollouts_continue_exactly_where_the_last_one_ended():
    """One actor, a slow look at its memory: rows, agent state and behaviour policy fit together."""
    flags = monobeast.Flags(
        env="Memory",
        model="mlp",
        use_lstm=True,
        unroll_length=7,
        batch_size=3,
        num_actors=1,
        envs_per_actor=3,
    )
    envs = monobeast.make_group(flags, 1, seed=0)
    model = monobeast.build_model(flags, envs.spec)
    rollouts = monobeast.RolloutMemory(flags, envs.spec, model)
    weights = monobeast.SharedWeights(model)
    weights.publish(model, 0)
    shared = monobeast.Shared(rollouts, weights, shared_zeros((1,), torch.int64))
    actors = monobeast.Actors(flags, shared, seed=0)
    batches = []
    deadline = time.monotonic() + 60
    try:
        while len(batches) < 12 and time.monotonic() < deadline:
            filled = actors.poll()
            for i in range(0, len(filled), 3):
                batches.append(rollouts.collect(filled[i : i + 3], torch.device("cpu")))
                actors.release(filled[i : i + 3])
    finally:
        actors.close()
    assert len(batches) >= 12
    for (batch, _), (following, _) in itertools.pairwise(batches):
        for name in rollouts.rows:
            assert torch.equal(batch[name][-1], following[name][0]), name
    for batch, state in batches:
        assert torch.equal(batch["last_action"][1:], batch["action"])
        with torch.no_grad():
            output, _ = model(batch, state)
        torch.testing.assert_close(
            output["policy_logits"][:-1], batch["policy_logits"], rtol=1e-4, atol=1e-5
        )
    states = torch.stack([state[0] for _, state in batches])
    assert states.abs().max() > 0  # the memory is carried over


# --- What breaks ------------------------------------------------------------------------------


def test_a_killed_actor_is_logged_and_replaced(tmp_path):
    with Training(tmp_path, *SMALL, "--num_actors", "2") as training:
        training.wait_for_step(1)
        for _ in range(3):
            victim = training.actors()[0]
            victim.kill()
            training.wait_for(lambda v=victim: not v.is_running(), "end")
            training.wait_for(lambda: len(training.actors()) == 2, "other actor")
            training.wait_for_step(training.step + 3000)
        assert re.search(r"Actor \d was killed by SIGKILL; restarting it", training.output)
        assert training.end(signal.SIGTERM) == 0


def test_what_an_actor_has_started_ends_with_it(tmp_path):
    """Simulators often are programs of their own."""
    what = "import subprocess; subprocess.Popen(['sleep', '1000'])"
    env = fragile(tmp_path, 10, what)
    args = ("--env", "fragile:make", "--total_steps", "100000000", "--num_actors", "1")
    with Training(tmp_path, *args, "--envs_per_actor", "1", env=env) as training:

        def sleepers():
            return [p for p in training.family() if p.name() == "sleep"]

        training.wait_for(sleepers, "simulator")
        (sleeper,) = sleepers()
        training.wait_for_step(1)
        sleeper.parent().kill()
        training.wait_for(lambda: not sleeper.is_running() or sleeper.status() == "zombie", "end")
        training.wait_for(sleepers, "simulator of the next actor")
        assert training.end(signal.SIGTERM) == 0


# A program that runs MonoBeast where the first forks fail.
NO_ROOM = """
import errno, os, sys
from libtorchbeast import supervisor
from torchbeast import monobeast

fork, failures = os.fork, 2 * supervisor.MAX_FAILURES
supervisor.BackOff.next_s = lambda self: 0.01

def failing_fork():
    global failures
    failures -= 1
    if failures >= 0:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()

os.fork = failing_fork
args = ["--savedir", sys.argv[1], "--env", "Catch", "--total_steps", "3000"]
args += ["--num_actors", "2", "--start_method", "fork"]
sys.exit(monobeast.run_command_line(monobeast.Flags, monobeast.main, args))
"""


def test_a_fork_for_which_there_is_no_room_is_tried_again(tmp_path):
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path)]
    result = subprocess.run(
        command, cwd=ROOT, timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "cannot be started" in result.stderr
    assert "Traceback" not in result.stderr


def test_training_outlives_a_fork_server_that_is_killed(tmp_path):
    with Training(tmp_path, *SMALL, "--num_actors", "2") as training:
        training.wait_for_step(1)
        server = training.actors()[0].parent()
        assert "forkserver" in " ".join(server.cmdline())
        server.kill()
        training.wait_for(lambda: not server.is_running(), "end of the fork server")
        training.wait_for_step(training.step + 5000)
        assert training.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_actors_end_by_themselves_however_they_were_started(tmp_path, start_method):
    before = shared_memory()
    args = ("--num_actors", "2", "--start_method", start_method)
    with Training(tmp_path, *SMALL, *args) as training:
        training.wait_for_step(1)
        assert training.end(signal.SIGKILL) == -signal.SIGKILL
    assert shared_memory() == before


def test_a_signal_ends_forked_actors_too(tmp_path):
    before = shared_memory()
    with Training(tmp_path, *SMALL, "--start_method", "fork") as training:
        training.wait_for_step(1)
        training.stop(signal.SIGINT, 130)
    assert shared_memory() == before


def test_each_actor_draws_its_own_random_numbers(tmp_path):
    what = "import numpy, os; open(f'{os.getpid()}.txt', 'w').write(str(numpy.random.rand()))"
    env = fragile(tmp_path, 10, what)
    args = ("--env", "fragile:make", "--total_steps", "3000", "--envs_per_actor", "1")
    result = run(tmp_path, *args, "--num_actors", "3", env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    drawn = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert len(set(drawn)) == len(drawn) == 3


def test_environments_are_closed_at_the_end(tmp_path):
    (tmp_path / "closing.py").write_text(
        "import gymnasium, os\n"
        "class Closing(gymnasium.Wrapper):\n"
        "    def close(self):\n"
        "        open(f'{os.getpid()}.closed', 'w').close()\n"
        "def make():\n"
        "    return Closing(gymnasium.make('CartPole-v1'))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    args = ("--env", "closing:make", "--total_steps", "3000", "--num_actors", "3")
    result = run(tmp_path, *args, env=env, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.glob("*.closed"))) == 1 + 3  # the main process looked at one, too


def test_an_environment_that_hangs_is_killed_and_replaced(tmp_path):
    env = fragile(tmp_path, 500, "import time; time.sleep(1000)")
    args = ("--env", "fragile:make", "--total_steps", "40000", "--actor_timeout_s", "8")
    result = run(tmp_path, *args, "--xpid", "run", env=env)
    assert result.returncode == 0, result.stderr
    said = re.search(r"Actor \d has done nothing for \d+ s \(--actor_timeout_s\)", result.stderr)
    assert said, result.stderr
    assert "fragile.py" in result.stderr  # where it was
    assert "restarting it" in result.stderr


def test_an_actor_that_waits_for_slots_does_not_hang(tmp_path):
    """Its heartbeat stands still while the learner is slow, and that is no fault of its own."""
    flags = monobeast.Flags(env="Catch", model="mlp", num_actors=1, envs_per_actor=2, batch_size=1)
    envs = monobeast.make_group(flags, 1, seed=0)
    model = monobeast.build_model(flags, envs.spec)
    weights = monobeast.SharedWeights(model)
    weights.publish(model, 0)
    rollouts = monobeast.RolloutMemory(flags, envs.spec, model)
    shared = monobeast.Shared(rollouts, weights, shared_zeros((1,), torch.int64))
    actors = monobeast.Actors(flags, shared, seed=0)
    (child,) = actors.supervisor.children
    filled, deadline = [], time.monotonic() + 60
    try:
        while actors._held[0] or not filled:  # nothing is released
            filled += actors.poll()
            assert time.monotonic() < deadline
        before = child.process.heartbeat()
        assert child.process.heartbeat() > before
        actors.release(filled)
        while not actors.poll():
            assert time.monotonic() < deadline
        (pid,) = actors.supervisor.pids
        assert psutil.pid_exists(pid)
    finally:
        actors.close()
    assert not psutil.pid_exists(pid)


def test_shared_memory_has_no_name_and_needs_no_dev_shm(tmp_path):
    """Which has 64 MB in a container, or less."""
    with Training(tmp_path, *SMALL) as training:
        training.wait_for_step(1)
        for process in (training.family()[0], *training.actors()):
            paths = [mapping.path for mapping in process.memory_maps()]
            assert any("torchbeast-tensors" in path for path in paths), paths
            assert not any(path.startswith("/dev/shm/") for path in paths), paths
        assert training.end(signal.SIGTERM) == 0


def test_rollouts_that_no_memory_holds_are_refused_with_a_sentence(tmp_path):
    result = run(tmp_path, "--env", "Mock", "--num_buffers", "100000000")
    assert result.returncode == 2
    assert "rollouts take" in result.stderr
    assert "--num_buffers" in result.stderr
    assert "Traceback" not in result.stderr


# --- Test modes -------------------------------------------------------------------------------


def test_rendering_writes_a_video(tmp_path):
    args = ("--env", "PongNoFrameskip-v4", "--total_steps", "320")
    result = run(tmp_path, *args)
    assert result.returncode == 0, result.stderr
    result = run(tmp_path, "--mode", "test_render", "--num_episodes", "1")
    assert result.returncode == 0, result.stderr
    import cv2

    video = cv2.VideoCapture(str(tmp_path / "latest" / "test.mp4"))
    steps = int(re.search(r"in (\d+) steps", result.stdout).group(1))
    assert video.get(cv2.CAP_PROP_FRAME_COUNT) == steps
    assert video.read()[1].shape == (210, 160, 3)
