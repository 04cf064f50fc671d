"""`python -m torchbeast.polybeast_env`: one sentence for a mistake, and nothing left at the end."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from libtorchbeast.rpc.security import Security
from tests.helpers.certificates import write_secret
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


@pytest.mark.slow
def test_environments_that_are_refused_wait_and_are_asked_for_again(tmp_path):
    """A token that is put right later must be enough: nobody restarts a fleet by hand."""
    token = tmp_path / "token"
    write_secret(token, "secret")
    mine = tmp_path / "mine"
    write_secret(mine, "another")
    with learner(listen=["127.0.0.1:0"], security=Security(token_file=token)) as it:
        process = start("--connect", it.address, "--env", "tests.helpers.counting:Counting",
                        "--token_file", str(mine))  # fmt: skip
        try:
            wait_until(lambda: any(client.refused for client in it.gateways.clients))
            assert process.poll() is None
            write_secret(mine, "secret")
            it.wait_for_environments(1)
        finally:
            process.terminate()
            _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "refused these environments: The token must be this end's, got another one" in error
    assert "Traceback" not in error


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
