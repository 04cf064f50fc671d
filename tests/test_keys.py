"""`python -m torchbeast.keys`, and what its certificates and tokens can do while they change."""

import contextlib
import dataclasses
import os
import socket
import ssl
import stat
import sys

import pytest

from libtorchbeast import secret
from libtorchbeast.env_workers import Workers, WorkersConfig
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.certificates import RevokedNames
from libtorchbeast.rpc.handshake import Refused
from libtorchbeast.rpc.security import Security
from libtorchbeast.specs import spec_of
from tests.helpers.certificates import Certificates
from tests.helpers.threads import run_in_threads, wait_until
from torchbeast import keys
from torchbeast.envs import GROUP_FACTORY, EnvOptions, make_envs


@pytest.fixture
def ours(tmp_path):
    return Certificates.make(tmp_path / "keys")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# ---------------------------------------------------------------------------------------- commands


def test_private_keys_and_tokens_are_their_owners_alone(ours):
    ours.command("server", "hostA", "192.0.2.8")
    ours.command("token")
    private = {"ca.key", "learner.key", "worker.key", "hostA.key", "token"}
    modes = {path.name: mode_of(path) for path in ours.folder.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == private
    assert mode_of(ours.folder) == 0o700
    assert len(Security(token_file=ours.path("token")).read_token()) == 64


def test_nothing_is_replaced_unless_asked_for(ours, capsys):
    before = ours.path("learner.pem").read_bytes()
    folder = ["--folder", str(ours.folder)]
    assert keys.main(["learner", "learner", *folder]) == 2
    assert "learner.pem is there already; give --replace" in capsys.readouterr().err
    assert ours.path("learner.pem").read_bytes() == before
    assert keys.main(["learner", "learner", *folder, "--replace"]) == 0
    assert ours.path("learner.pem").read_bytes() != before


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["worker", "learner"], "A worker's name has at most 64"),
        (["worker", "../ca"], "A worker's name has at most 64"),
        (["learner"], "Give the host names and addresses that it is called by"),
        (["learner", "learner:4242"], "has no port, got 'learner:4242'"),
        (["worker", "one", "--days", "0"], "days must be at least 1, got 0"),
        (["worker", "one", "--folder", "/nowhere"], "python -m torchbeast.keys authority"),
    ],
)
def test_a_mistake_is_one_sentence(ours, args, sentence, capsys):
    folder = [] if "--folder" in args else ["--folder", str(ours.folder)]
    assert keys.main([*args, *folder]) == 2
    assert sentence in capsys.readouterr().err


def test_without_cryptography_a_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert keys.main(["token"]) == 2
    assert "pip install cryptography" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- handshakes


def handshake(ours, server_name, client_name):
    """A TLS handshake of Python's own ssl, names of hosts aside; what the ends say of it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.path(f"{server_name}.pem"), ours.path(f"{server_name}.key"))
    server.load_verify_locations(ours.path("ca.pem"))
    server.verify_mode = ssl.CERT_REQUIRED
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(ours.path("ca.pem"))
    client.load_cert_chain(ours.path(f"{client_name}.pem"), ours.path(f"{client_name}.key"))
    said = {}

    def serve(connection):
        try:
            with server.wrap_socket(connection, server_side=True) as wrapped:
                wrapped.recv(1)
            said["server"] = "ok"
        except OSError as error:
            said["server"] = str(error)

    def dial(connection):
        try:
            with client.wrap_socket(connection) as wrapped:
                wrapped.send(b"x")
            said["client"] = "ok"
        except OSError as error:
            said["client"] = str(error)

    near, far = socket.socketpair()
    with near, far, run_in_threads(lambda: serve(near), lambda: dial(far)):
        pass
    return said


def test_what_a_certificate_is_for_stands_in_it(ours):
    ours.command("server", "hostA")
    assert handshake(ours, "learner", "worker") == {"server": "ok", "client": "ok"}
    assert handshake(ours, "hostA", "learner") == {"server": "ok", "client": "ok"}
    assert "purpose" in handshake(ours, "worker", "worker")["client"]
    assert "purpose" in handshake(ours, "learner", "hostA")["server"]


# ---------------------------------------------------------------------------------------- rotation


def test_the_list_of_revoked_names_is_read_anew(tmp_path):
    path = tmp_path / "revoked"
    path.write_text("# lost on a train\ngpu-1\n\n")
    names = RevokedNames(path)
    with pytest.raises(Refused, match="The certificate of gpu-1 is revoked"):
        names.check("gpu-1")
    names.check("gpu-2")
    path.write_text("gpu-2  # stolen\n")
    names.check("gpu-1")
    with pytest.raises(Refused, match="gpu-2 is revoked"):
        names.check("gpu-2")
    path.unlink()
    with pytest.raises(Refused, match="gpu-2 is revoked"):  # what was read stays in force
        names.check("gpu-2")


# ------------------------------------------------------------------------------------ environments


def test_workers_do_not_see_the_token(monkeypatch):
    monkeypatch.setenv("TORCHBEAST_TOKEN", "secret")
    options = EnvOptions("tests.helpers.curious:Curious")
    with contextlib.closing(make_envs(options, num_envs=1)) as envs:
        row = envs.reset()
    assert row["frame"][0, 2] == 1, "it is seen in a process that has it"
    config = WorkersConfig(GROUP_FACTORY, dataclasses.asdict(options), Spec(spec_of(row["frame"])),
                           num_workers=1, num_groups=1, envs_per_group=1, seed=0)  # fmt: skip
    workers = Workers(config)
    try:
        [lane] = workers.lanes
        wait_until(lambda: (workers.poll(), lane.num_passes > 0)[1])
        assert lane.rows["frame"][0, 2] == 0
    finally:
        workers.close()


def test_our_programs_take_the_token_out_of_their_environment(monkeypatch):
    monkeypatch.setattr(secret, "_token", "")
    monkeypatch.setenv("TORCHBEAST_TOKEN", "secret")
    secret.take()
    assert "TORCHBEAST_TOKEN" not in os.environ
    assert Security().read_token() == "secret"
    secret.take()
    assert Security().read_token() == "secret"
