"""`python -m torchbeast.polybeast_env`: one sentence for a mistake, and nothing left at the end."""

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from libtorchbeast.env_host import HostConfig, is_false_start, run_at_address
from libtorchbeast.groups import Broken
from libtorchbeast.rpc.address import listen_unix
from libtorchbeast.rpc.security import Security
from libtorchbeast.supervisor import CANNOT_WORK
from tests.helpers.counting import counting_group
from tests.helpers.remote import check_rollouts, learner
from tests.helpers.threads import wait_until
from torchbeast.polybeast_env import main, server_address


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchbeast.polybeast_env", "--num_servers", "1", *args]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--env", "Catsch"], "did you mean Catch"),
        (["--env", "Catch", "--num_servers", "0"], "num_servers must be more than 0, got 0."),
        (["--env", "Catch", "--connect", "learner"], "An address is unix:/path or host:port"),
        (["--env", "Catch", "--connect", "learner:1"], "needs TLS, and learner:1 has none"),
        (["--env", "Catch", "--pipes_basename", "0.0.0.0:1"], "needs TLS, and 0.0.0.0:1 has none"),
        (["--env", "Catch", "--tls_ca", "none.pem"], "tls_ca must be a file that can be read"),
        (["--env", "remote", "--connect", "127.0.0.1:1"], "--env remote stands for environments"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args, sentence, capsys):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_server_addresses_are_counted_up():
    assert server_address("unix:/tmp/polybeast", 3) == "unix:/tmp/polybeast.3"
    assert server_address("[::1]:5000", 3) == "[::1]:5003"


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Runs a host at an address that is taken; how it ends."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    logged = SimpleNamespace(send=lambda level, text: None, beat=None, tick=None)

    def run(kind, is_first_start):
        with contextlib.ExitStack() as stack:
            address = f"unix:{tmp_path}/socket"
            if kind == "unix":
                stack.enter_context(listen_unix(address))
            else:
                taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                address = f"127.0.0.1:{taken.getsockname()[1]}"
            config = HostConfig(
                "x", "no:factory", {}, 1, 1, 0, address=address, is_first_start=is_first_start
            )
            try:
                run_at_address(config, logged)
            except (SystemExit, OSError) as error:
                return error.code if isinstance(error, SystemExit) else error.errno

    return run


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_an_address_that_is_taken_ends_the_program_only_at_its_start(kind, host):
    """On a restart somebody else may have it for a moment: the supervisor tries again."""
    assert host(kind, is_first_start=True) == CANNOT_WORK
    assert host(kind, is_first_start=False) != CANNOT_WORK


def test_a_lack_of_descriptors_never_ends_the_program(host, monkeypatch):
    def listen(address):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("libtorchbeast.rpc.env_server.listen_unix", listen)
    assert host("unix", is_first_start=True) == errno.EMFILE
    server = SimpleNamespace(add_insecure_port=lambda address: 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="open files"):
            Security().add_port(server, "127.0.0.1:1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(OSError, match="the port may be in use"):
        Security().add_port(server, "127.0.0.1:1")


@pytest.mark.slow
def test_an_environment_that_raises_is_logged_and_rebuilt_alone():
    with learner(listen=["127.0.0.1:0"]) as it:
        process = start("--connect", it.address, "--env", "tests.helpers.counting:Fragile",
                        "--envs_per_server", "2")  # fmt: skip
        try:
            it.wait_for_environments(4)
        finally:
            process.terminate()
            _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert error.count("Traceback") == 1
    assert "the wheel came off" in error
    assert "restarting" not in error
    for rows, _, _ in it.rollouts:
        new = rows["truncated"][1:, 0]
        changed = rows["frame"][1:, 0, 0] != rows["frame"][:-1, 0, 0]
        assert not (changed & ~new).any()
        assert rows["done"][1:, 0][new].all()
        assert (rows["episode_step"][1:, 0][new] == 0).all()


@pytest.mark.parametrize(
    ("error", "num_steps", "expected"),
    [
        (KeyError("no such level"), [], True),
        (OSError(errno.ENOENT, "no such file"), [], True),
        (OSError(errno.EMFILE, "too many open files"), [], False),  # later there may be room
        (MemoryError(), [], False),
        (Broken(), [4, 4], True),
        (Broken(), [4, 100], False),
        (RuntimeError("the learner refused what was sent"), [4, 4], False),
    ],
)
def test_what_counts_as_environments_that_have_never_worked(error, num_steps, expected):
    groups = [counting_group(1) for _ in num_steps]
    for group, number in zip(groups, num_steps, strict=True):
        for _ in range(number):
            group.step(np.zeros(1, np.int64))
    assert is_false_start(error, groups, num_groups=2) == expected


@pytest.mark.slow
@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix:{}/learner"])
def test_environments_that_never_work_end_with_a_traceback_and_a_sentence(where, tmp_path):
    with learner(listen=[where.format(tmp_path)]) as it:
        process = start("--connect", it.address, "--env", "tests.helpers.counting:Broken",
                        "--envs_per_server", "2")  # fmt: skip
        try:
            _, error = process.communicate(timeout=100)
        finally:
            process.kill()
    assert process.returncode == 1
    *_, text, sentence = error.partition("error: ")[2].strip().splitlines()
    assert "RuntimeError: the wheel was never there" in text
    assert sentence.startswith("No environment has ever worked: all processes have failed 5 times")
    assert not error.partition("error: ")[0].count("No environment")


@pytest.mark.slow
def test_a_game_of_many_agents_dials_in_as_a_whole():
    with learner(listen=["127.0.0.1:0"], agent=lambda time: time % 3) as it:
        process = start("--connect", it.address, "--env", "tests.helpers.games:crowd")
        try:
            it.wait_for_environments(10)  # by the first number of what they see, their agent's
            it.wait_for_rollouts(40)
        finally:
            process.terminate()
            _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "A game has 10 agents: a server has 20 environments, two games." in error
    lengths = set()
    for rows, _, _ in it.rollouts:
        ends = rows["done"][1:, 0] & ~rows["truncated"][1:, 0]
        lengths.update(rows["episode_step"][1:, 0][ends].tolist())
    assert lengths == {3, 5}


def test_too_few_places_for_a_game_are_one_sentence(capsys):
    args = ["--env", "tests.helpers.games:crowd", "--envs_per_server", "16"]
    assert main(args) == 2
    assert "places for all 10 agents of a game, got 8; leave" in capsys.readouterr().err


@pytest.mark.slow
def test_an_environment_that_hangs_is_restarted_and_its_stack_logged():
    with learner(listen=["127.0.0.1:0"]) as it:
        process = start("--connect", it.address, "--env", "tests.helpers.counting:Hanging",
                        "--envs_per_server", "1", "--env_timeout_s", "5")  # fmt: skip
        try:
            it.wait_for_environments(2)
        finally:
            process.terminate()
            _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Server 0 has done nothing for" in error
    assert "It hangs here:" in error
    assert "counting.py" in error
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_and_no_socket_is_left(kill, tmp_path):
    process = start("--pipes_basename", f"unix:{tmp_path}/server", "--env", "Catch")
    wait_until(lambda: (tmp_path / "server.0").exists())
    [child] = psutil.Process(process.pid).children()
    os.kill(process.pid, kill)
    process.communicate(timeout=30)
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    if kill != signal.SIGKILL:
        assert process.returncode == (130 if kill == signal.SIGINT else 0)
        assert os.listdir(tmp_path) == []
