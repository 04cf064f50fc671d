"""Certificates and tokens that were stolen, are open to others, or change; see test_attacks.py.

Not here, as nobody plays beside them: test_workers_do_not_see_the_token (test_keys.py).
"""

import signal
import ssl
import subprocess
import sys

import pytest

import torchbeast
from libtorchbeast.rpc.security import Security
from tests.helpers.attacks import Bystander, under_attack
from tests.helpers.certificates import Certificates, of_holder, write_secret
from tests.helpers.counting import NUM_ACTIONS
from tests.helpers.remote import client, learner, serving
from tests.helpers.threads import wait_until
from tests.helpers.training import ROOT
from tests.test_rpc_security import try_to_play
from torchbeast import keys


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Beside those of a learner, a worker and a server: a worker's that was stolen, one with the
    learner's own names in it, and another learner's."""
    made = Certificates.make(tmp_path_factory.mktemp("keys"))
    made.command("worker", "stolen")
    made.command("server", "127.0.0.1")
    where, names = keys.Where(made.folder), keys._alternatives(("learner", "127.0.0.1"))
    keys._issue(where, "thief", "thief", names, ("clientAuth",))
    keys._issue(where, "other", "other", names, ("serverAuth", "clientAuth"))
    return made


# -------------------------------------------------------------------------------- stolen, revoked


@pytest.mark.parametrize("name", ["worker", "thief"])
def test_a_workers_certificate_cannot_pose_as_the_learner(name, certificates, token):
    """Even one that has the learner's names in it."""
    right = Security(tls_ca=certificates.path("ca.pem"), token_file=token.token_file)
    posing, ours = (
        Security(
            tls_cert=certificates.path(f"{who}.pem"),
            tls_key=certificates.path(f"{who}.key"),
            token_file=token.token_file,
        )
        for who in (name, "learner")
    )
    with under_attack(ours, right) as it, learner(listen=["127.0.0.1:0"], security=posing) as fake:
        assert try_to_play(fake.address, right) != "played"
        assert fake.gateways.num_streams == 0
        assert try_to_play(it.address, right) == "played"
        it.bystander.plays_on()


def test_a_worker_cannot_pose_as_the_learner_where_environments_listen(certificates, token, caplog):
    """The learner plays with the other group of the same server."""
    theirs = of_holder(certificates, "127.0.0.1", token, tls_client_certs=True)
    with serving("127.0.0.1:0", security=theirs, max_groups=2) as server:
        address = [server.server_address]
        right = of_holder(certificates, "learner", token)
        with learner(server_addresses=address, security=right) as it:
            bystander = Bystander(it, 2)
            thief = of_holder(certificates, "stolen", token)
            with learner(server_addresses=address, security=thief) as posing:
                wait_until(
                    lambda: "stolen is a worker's certificate, and only a learner" in caplog.text
                )
                bystander.plays_on()
                assert posing.gateways.num_streams == 0
        bystander.check(one_stream=True)


def test_a_revoked_worker_is_sent_away_and_stays_away(certificates, token, tmp_path):
    revoked = tmp_path / "revoked"
    revoked.write_text("# nobody yet\n")
    ours = of_holder(certificates, "learner", token, tls_client_certs=True, revoked=revoked)
    stolen = of_holder(certificates, "stolen", token)
    with under_attack(ours, of_holder(certificates, "worker", token)) as it:
        with client(it.address, security=stolen):
            it.wait_for_streams(2)
            revoked.write_text("stolen\n")
            it.wait_for_streams(1)
            it.bystander.plays_on()
        assert "The certificate of stolen is revoked" in try_to_play(it.address, stolen)


def test_a_revoked_learner_is_sent_away_where_environments_listen(certificates, token, tmp_path):
    """Another learner plays with the other group of the same server."""
    revoked = tmp_path / "revoked"
    revoked.write_text("# nobody yet\n")
    theirs = of_holder(certificates, "127.0.0.1", token, tls_client_certs=True, revoked=revoked)
    with serving("127.0.0.1:0", security=theirs, max_groups=2) as server:
        address = [server.server_address]
        other = of_holder(certificates, "other", token)
        with learner(server_addresses=address, security=other) as it:
            bystander = Bystander(it, 2)
            stolen = of_holder(certificates, "learner", token)
            with learner(server_addresses=address, security=stolen) as sent_away:
                sent_away.wait_for_streams(1)
                revoked.write_text("learner\n")
                sent_away.wait_for_streams(0)
                bystander.plays_on()
        bystander.check(one_stream=True)


# ---------------------------------------------------------------------------------------- rotation


def certificate_at(address):
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=10).strip()


def test_certificates_are_replaced_while_the_learner_runs(token, tmp_path):
    made = Certificates.make(tmp_path / "keys")
    ours = Security(
        tls_cert=made.path("learner.pem"),
        tls_key=made.path("learner.key"),
        token_file=token.token_file,
    )
    right = Security(tls_ca=made.path("ca.pem"), token_file=token.token_file)
    with under_attack(ours, right) as it:
        first = made.path("learner.pem").read_text().strip()
        assert certificate_at(it.address) == first
        key = made.path("learner.key").read_bytes()
        write_secret(made.path("learner.key"), "half of a new pair")
        assert certificate_at(it.address) == first
        made.path("learner.key").write_bytes(key)
        made.command("learner", "127.0.0.1", "--replace")
        second = made.path("learner.pem").read_text().strip()
        assert certificate_at(it.address) == second != first
        assert try_to_play(it.address, right) == "played"


def test_a_token_is_replaced_while_the_learner_runs(tmp_path):
    token = write_secret(tmp_path / "token", "old")
    old, new = (write_secret(tmp_path / name, name) for name in ("old", "new"))
    with under_attack(Security(token_file=token), Security(token_file=old)) as it:
        write_secret(token, "new")
        assert "got another one" in try_to_play(it.address, Security(token_file=old))
        assert try_to_play(it.address, Security(token_file=new)) == "played"


# ------------------------------------------------------------------------- who may see the token


def test_a_token_file_that_others_can_read_is_refused_with_the_remedy(token, tmp_path):
    path = tmp_path / "a token"
    path.write_text("secret")
    mine = Security(token_file=path)
    with under_attack(token) as it:
        for mode in (0o644, 0o640, 0o604, 0o620):
            path.chmod(mode)
            remedy = f"has mode {mode:04o}; run: chmod 600 '.*a token'"
            with pytest.raises(ValueError, match=remedy):
                torchbeast.connect(it.address, num_actions=NUM_ACTIONS, security=mine)
            with pytest.raises(ValueError, match=remedy):
                mine.check_listening("127.0.0.1:1")
        path.chmod(0o600)
        assert try_to_play(it.address, mine) == "played"


@pytest.mark.slow
@pytest.mark.parametrize("dials", [True, False], ids=["dials", "listens"])
def test_environments_elsewhere_do_not_see_the_token(tmp_path, monkeypatch, dials):
    """Though the process that steps them dials with it, or asks for it."""
    monkeypatch.setenv("TORCHBEAST_TOKEN", "secret")
    at_socket = f"unix:{tmp_path}/server"
    with under_attack(server_addresses=[] if dials else [f"{at_socket}.0"]) as it:
        assert "got another one" in try_to_play(it.address, wrong_token(tmp_path))
        beside = set(it.bystander.ids)
        where = ["--connect", it.address] if dials else ["--pipes_basename", at_socket]
        command = [sys.executable, "-m", "torchbeast.polybeast_env", "--num_servers", "1"]
        command += ["--env", "tests.helpers.curious:Curious", "--envs_per_server", "1", *where]
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            it.wait_for_environments(2)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    theirs = [rows for rows, _, _ in it.rollouts if int(rows["frame"][0, 0, 0]) not in beside]
    assert theirs
    assert all((rows["frame"][..., 2] == 0).all() for rows in theirs)


def wrong_token(tmp_path):
    return Security(token_file=write_secret(tmp_path / "wrong", "guessed"))
