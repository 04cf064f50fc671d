"""`python -m torchbeast.fleet`: its flags, what it keeps of a fleet, and one on this machine."""

import dataclasses
import os
import signal
import subprocess
import sys
import types

import pytest

from libtorchbeast import secret
from libtorchbeast.rpc.security import Security
from tests.helpers.certificates import Certificates, write_secret
from tests.helpers.fleet import LocalFleet, fleet
from tests.helpers.remote import check_rollouts, learner
from tests.helpers.training import TIMEOUT_S, Training
from torchbeast.fleet import ray_actors
from torchbeast.fleet.__main__ import main
from torchbeast.fleet.flags import Flags, TaskFlags
from torchbeast.fleet.ray_actors import Secrets
from torchbeast.fleet.task import split


def command(capsys, *args):
    """One that ends at once, in this process; what it prints."""
    assert main(list(args)) == 0
    return capsys.readouterr().out


COUNTING = ("--env", "tests.helpers.counting:Counting", "--envs_per_server", "1")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "A fleet dials a learner that listens; give its address"),
        (["--connect", "127.0.0.1:1", "--name", "a/b"], "A fleet's name has at most 64 letters"),
        (["--connect", "learner:1"], "needs TLS, and learner:1 has none"),
        (["--connect", "127.0.0.1:1", "--env", "Catsch"], "did you mean Catch"),
        (["--connect", "127.0.0.1:1", "--slurm_partition", "gpu"], "is for --launcher slurm"),
        (["--connect", "127.0.0.1:1", "--cpus_per_server", "2"], "is for --launcher ray and slurm"),
        (
            ["--connect", "127.0.0.1:1", "--launcher", "ray", "--servers_per_task", "0"],
            "servers_per_task must be more than 0, got 0.",
        ),
        (
            ["--connect", "127.0.0.1:1", "--launcher", "ray", "--ray_resources", "[1]"],
            "--ray_resources must be a JSON object, got [1].",
        ),
        (["--connect", "127.0.0.1:1", "--autocast", "bf16"], "--autocast is for --role actors"),
        (["--connect", "127.0.0.1:1", "--name", "taken"], "A fleet's state is kept in"),
        (["status", "--name", "nobody"], "There must be a fleet named nobody in"),
        (["stop", "--name", "nobody"], "There must be a fleet named nobody in"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args, sentence, capsys, tmp_path):
    env = [] if args[:1] in (["status"], ["stop"]) or "--env" in args else ["--env", "Catch"]
    (tmp_path / "taken").touch()
    assert main([*args, *env, "--savedir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("launcher", "package"), [("ray", "ray"), ("slurm", "submitit")], ids=["ray", "slurm"]
)
def test_without_its_package_a_sentence_says_what_to_install(
    launcher, package, capsys, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    args = ["--launcher", launcher, "--connect", "127.0.0.1:1", "--env", "Catch"]
    assert main([*args, "--savedir", str(tmp_path)]) == 2
    assert f"pip install 'torchbeast[{launcher}]'" in capsys.readouterr().err


def test_tasks_share_the_servers_and_no_seed():
    flags = Flags(launcher="ray", connect="127.0.0.1:1", env="Catch", num_servers=7, seed=3,
                  servers_per_task=3, cpus_per_server=0.5, memory_gb_per_server=2)  # fmt: skip
    shares = split(flags)
    assert [share.num_servers for share in shares] == [3, 3, 1]
    assert len({share.seed for share in shares}) == 3
    assert split(flags) == shares
    assert (flags.cpus_per_task, flags.memory_gb_per_task) == (1.5, 6)
    assert [share.seed for share in split(dataclasses.replace(flags, seed=None))] == [None] * 3


def test_what_a_task_is_given_holds_paths_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_secret(tmp_path / "token", "very secret")
    [share, _] = split(Flags(launcher="slurm", connect="127.0.0.1:1", num_servers=2,
                             token_file="token"))  # fmt: skip
    assert str(share.token_file) == str(tmp_path / "token")
    assert "very secret" not in repr(share)


def test_slurm_takes_no_token_from_a_variable(capsys, tmp_path, monkeypatch):
    """Slurm keeps a job's variables, and not for the eyes of its owner alone."""
    monkeypatch.setattr(secret, "_token", "")
    monkeypatch.setenv(secret.VARIABLE, "very secret")
    args = ["--launcher", "slurm", "--connect", "127.0.0.1:1", "--env", "Catch"]
    assert main([*args, "--savedir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "give --token_file" in error
    assert "very secret" not in error


def test_secrets_for_ray_are_read_back_in_memory_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(secret, "_token", "")
    certificates = Certificates.make(tmp_path / "keys")
    paths = {"tls_ca": "ca.pem", "tls_cert": "worker.pem", "tls_key": "worker.key"}
    flags = Flags(
        launcher="ray",
        connect="learner:4242",
        token_file=write_secret(tmp_path / "token", "very secret\n"),
        **{name: certificates.path(path) for name, path in paths.items()},
    )
    secrets = Secrets.of(flags)
    assert "very secret" not in repr(secrets)
    assert "PRIVATE" not in repr(secrets)
    [share, *_] = split(flags)
    unpacked = secrets.unpack(share)
    for name, path in paths.items():
        found = getattr(unpacked, name)
        assert not str(found).startswith(str(tmp_path))
        assert found.read_bytes() == certificates.path(path).read_bytes()
        os.close(int(found.name))
    assert unpacked.read_token() == "very secret"


def test_a_task_of_ray_says_what_its_machine_lacks(monkeypatch):
    ray = pytest.importorskip("ray")
    context = types.SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_actors, "log_to_stderr", lambda: None)
    monkeypatch.setattr(secret, "_token", "")
    flags = TaskFlags(env="nowhere:make", connect="127.0.0.1:1", num_servers=1)
    task = ray_actors.RayTask(flags, Secrets("", {}))
    task.stop()
    figures = task.figures()
    assert figures["state"].startswith("cannot work: ")
    assert "nowhere" in figures["state"]
    assert figures["servers"] == "0 of 1"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_local_fleet_dials_in_a_killed_server_returns_and_stop_ends_all(tmp_path, capsys):
    three = ("--savedir", str(tmp_path), "--name", "three")
    token = write_secret(tmp_path / "token", "very secret")
    with learner(listen=["127.0.0.1:0"], security=Security(token_file=token)) as it:
        where = ("--connect", it.address, "--token_file", str(token), "--name", "three")
        with LocalFleet(tmp_path, *COUNTING, "--num_servers", "3", *where) as here:
            it.wait_for_environments(3)
            servers = here.family()[1:]
            assert len(servers) == 3
            servers[0].kill()
            it.wait_for_environments(4)  # a restart has an environment of its own
            here.wait_for(lambda: "killed by SIGKILL; restarting it" in here.output, "message")
            here.wait_for(lambda: "3 of 3   1" in command(capsys, "status", *three), "restart")
            shown = command(capsys, "status", *three[:2])
            assert "three: 3 servers of tests.helpers.counting:Counting for 127.0.0.1" in shown
            second = fleet(tmp_path, *COUNTING, *where, code=2)
            assert "A fleet named three runs already" in second
            for process in here.family():
                assert "very secret" not in " ".join(process.cmdline())
            assert "very secret" not in (tmp_path / "three/fleet.json").read_text()
            family = here.family()
            assert "three has ended." in fleet(tmp_path, "stop", "--name", "three")
            assert here.process.wait(TIMEOUT_S) == 0
            assert not any(process.is_running() for process in family[1:])
        assert "three has ended." in command(capsys, "status", *three)
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.slow
def test_a_local_fleet_that_is_killed_leaves_no_process_and_can_be_started_again(tmp_path, capsys):
    args = (*COUNTING, "--num_servers", "1", "--connect", "127.0.0.1:1")
    with LocalFleet(tmp_path, *args) as first:
        first.wait_for(lambda: len(first.family()) == 2, "server")
        first.end(signal.SIGKILL)
    assert "fleet has ended." in command(capsys, "status", "--savedir", str(tmp_path))
    with LocalFleet(tmp_path, *args) as second:
        second.wait_for(lambda: len(second.family()) == 2, "server")
        assert second.end(signal.SIGINT) == 130


def test_help_names_the_verbs():
    result = subprocess.run([sys.executable, "-m", "torchbeast.fleet", "status", "--help"],
                            capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert "python -m torchbeast.fleet stop --name NAME" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_fleet_of_actors_that_carry_the_model_plays_with_a_learner(tmp_path):
    address, savedir = f"unix:{tmp_path}/socket", tmp_path / "fleets"
    savedir.mkdir()
    learning = ("--env", "Catch", "--total_steps", "100000000", "--listen", address)
    what = ("--env", "Catch", "--role", "actors", "--num_servers", "1", "--envs_per_server", "32")
    with (
        Training("polybeast_learner", tmp_path, *learning) as training,
        LocalFleet(savedir, *what, "--connect", address, "--name", "carriers") as here,
    ):
        training.wait_for_step(4000)
        assert sum("torchbeast.run.remote_actor" in p.cmdline() for p in here.family()) == 1
        assert "carriers has ended." in fleet(savedir, "stop", "--name", "carriers")
        assert here.process.wait(TIMEOUT_S) == 0
        assert training.end(signal.SIGTERM) == 0
