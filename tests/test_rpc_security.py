"""Who may connect: addresses, TLS, tokens, sockets, rates."""

import contextlib
import dataclasses
import os
import re
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

import torchbeast
from libtorchbeast.rows import Spec
from libtorchbeast.rpc.address import Address, remove_stale_socket
from libtorchbeast.rpc.certificates import CallerCheck
from libtorchbeast.rpc.dialing import LearnerGone
from libtorchbeast.rpc.env_server import EnvironmentServer
from libtorchbeast.rpc.handshake import Refused, check_token
from libtorchbeast.rpc.limits import ConnectionRate, Limits
from libtorchbeast.rpc.security import Security
from libtorchbeast.shared_lanes import Lane, map_lane
from libtorchbeast.specs import INT64
from tests.helpers.attacks import under_attack
from tests.helpers.certificates import Certificates, write_secret
from tests.helpers.counting import NUM_ACTIONS, counting_group
from tests.helpers.remote import learner
from tests.helpers.threads import run_in_threads, wait_until
from tests.helpers.training import ROOT
from tests.test_rpc_bad_peers import HELLO, talk


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory):
    return Certificates.make(tmp_path_factory.mktemp("other_authority"))


@pytest.fixture
def token(tmp_path):
    return write_secret(tmp_path / "token", "a secret\n")


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        ("unix:/tmp/x", True),
        ("unix:relative", True),
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:4242", True),
        ("[::1]:80", True),
        ("0.0.0.0:4242", False),
        ("[::]:4242", False),
        ("10.0.0.1:4242", False),
        ("learner:4242", False),
        ("localhost.evil.example:1", False),
    ],
)
def test_addresses_are_local_or_not(text, is_local):
    assert Address.parse(text).is_local == is_local


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:99999", "unix:", "http://a:1"])
def test_what_is_no_address_is_told(text):
    with pytest.raises(ValueError, match="An address is unix:/path or host:port, got"):
        Address.parse(text)


def test_other_machines_need_tls_and_token(certificates, token, monkeypatch):
    monkeypatch.delenv("TORCHBEAST_TOKEN", raising=False)
    cert = {
        "tls_cert": certificates.path("learner.pem"),
        "tls_key": certificates.path("learner.key"),
    }
    for address in ("unix:/tmp/x", "127.0.0.1:1"):
        Security().check_listening(address)
        Security().check_dialing(address)
    away = "0.0.0.0:4242"
    with pytest.raises(ValueError, match=r"needs TLS, and 0.0.0.0:4242 has none; give tls_cert"):
        Security(token_file=token).check_listening(away)
    with pytest.raises(ValueError, match=r"needs TLS, and 0.0.0.0:4242 has none; give tls_ca"):
        Security(token_file=token).check_dialing(away)
    with pytest.raises(ValueError, match=r"needs a token, got none for 0.0.0.0:4242"):
        Security(**cert).check_listening(away)
    with pytest.raises(ValueError, match="needs a token"):
        Security(tls_ca=certificates.path("ca.pem")).check_dialing(away)
    Security(insecure=True).check_listening(away)
    Security(insecure=True).check_dialing(away)
    Security(**cert, token_file=token).check_listening(away)
    monkeypatch.setenv("TORCHBEAST_TOKEN", "secret")
    Security(**cert).check_listening(away)


def test_a_token_in_a_variable_may_end_its_line(monkeypatch):
    """As that of a Kubernetes secret does, which was made from a token file."""
    monkeypatch.setenv("TORCHBEAST_TOKEN", "secret\n")
    assert Security().read_token() == "secret"


def test_half_given_files_are_reported(certificates, tmp_path):
    with pytest.raises(ValueError, match="tls_cert and tls_key belong together"):
        Security(tls_cert=certificates.path("learner.pem")).check_listening("127.0.0.1:1")
    with pytest.raises(ValueError, match="tls_client_certs needs tls_ca"):
        Security(tls_client_certs=True).check_listening("127.0.0.1:1")
    with pytest.raises(ValueError, match="tls_ca must be a file that can be read"):
        Security(tls_ca=tmp_path / "none").check_dialing("127.0.0.1:1")
    write_secret(tmp_path / "empty", "\n")
    with pytest.raises(ValueError, match="token_file must hold a secret"):
        Security(token_file=tmp_path / "empty").read_token()


def test_files_that_are_no_certificates_are_reported(certificates, other_authority, tmp_path):
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    cert, ours = certificates.path("learner.pem"), certificates.path("learner.key")
    theirs = other_authority.path("learner.key")
    for security, sentence in [
        (Security(tls_ca=garbage), "tls_ca must be a certificate"),
        (Security(tls_cert=garbage, tls_key=ours), "tls_cert and tls_key must be a certificate"),
        (Security(tls_cert=cert, tls_key=theirs), "must be a certificate and its key"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            security.check_dialing("127.0.0.1:1")


def test_security_survives_json(token):
    security = Security(token_file=token, insecure=True, tls_server_name="learner")
    assert Security.from_json(security.to_json()) == security
    assert "a secret" not in str(security.to_json())
    flags = dataclasses.make_dataclass("Flags", ["env"], bases=(), frozen=True)
    assert not hasattr(flags("x"), "tls_ca")
    assert Security.of(security) == security


def try_to_play(address: str, security: Security) -> str:
    """What came of it: "played", or why not."""
    options = {"num_actions": NUM_ACTIONS, "security": security, "reconnect_s": 0.0}
    try:
        with torchbeast.connect(address, **options) as actor:
            actor.step(np.zeros(3, np.float32))
        return "played"
    except (Refused, LearnerGone) as error:
        return str(error)


def test_tls_and_token_let_the_right_ones_in(certificates, other_authority, token, tmp_path):
    wrong = write_secret(tmp_path / "wrong", "no secret")
    ours = Security(
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        token_file=token,
    )
    right = Security(tls_ca=certificates.path("ca.pem"), token_file=token)
    with under_attack(ours, right) as it:
        assert try_to_play(it.address, right) == "played"
        bad = dataclasses.replace(right, token_file=wrong)
        assert "The token must be this end's, got another one" in try_to_play(it.address, bad)
        none = dataclasses.replace(right, token_file=None)
        assert "got none" in try_to_play(it.address, none)
        no_tls = dataclasses.replace(right, tls_ca=None)
        assert try_to_play(it.address, no_tls) != "played"
        other_ca = dataclasses.replace(right, tls_ca=other_authority.path("ca.pem"))
        assert try_to_play(it.address, other_ca) != "played"
        other_name = dataclasses.replace(right, tls_server_name="somebody")
        assert try_to_play(it.address, other_name) != "played"
        assert try_to_play(it.address, right) == "played"


def test_paths_may_be_strings(token):
    security = Security(token_file=str(token))
    assert security == Security(token_file=token)
    assert security.read_token() == "a secret"
    assert Security.from_json(security.to_json()) == security


def test_the_example_with_a_token_in_the_docs_plays(certificates, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "remote.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "token" in c]
    shutil.copy(certificates.path("ca.pem"), tmp_path)
    write_secret(tmp_path / "token", "a secret")
    monkeypatch.chdir(tmp_path)  # where the example's files are
    ours = Security(
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        token_file="token",
    )
    actions = []

    class Enough(Exception):
        pass

    def simulate(action):
        actions.append(action)
        if len(actions) == 5:
            raise Enough
        return np.zeros(3, np.float32), 1.0, False

    names = {"simulate": simulate, "first_observation": np.zeros(3, np.float32)}
    with learner(listen=["127.0.0.1:0"], security=ours) as it, pytest.raises(Enough):
        exec(code.replace("learner:4242", it.address), names)
    assert all(action in range(3) for action in actions)


def test_client_certificates_are_demanded(certificates, other_authority, token):
    ours = Security(
        tls_ca=certificates.path("ca.pem"),
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        tls_client_certs=True,
        token_file=token,
    )
    right = Security(
        tls_ca=certificates.path("ca.pem"),
        tls_cert=certificates.path("worker.pem"),
        tls_key=certificates.path("worker.key"),
        token_file=token,
    )
    stranger = dataclasses.replace(
        right,
        tls_cert=other_authority.path("worker.pem"),
        tls_key=other_authority.path("worker.key"),
    )
    without = dataclasses.replace(right, tls_cert=None, tls_key=None)
    with under_attack(ours, right) as it:
        assert try_to_play(it.address, right) == "played"
        assert try_to_play(it.address, stranger) != "played"
        assert try_to_play(it.address, without) != "played"


def test_a_server_of_environments_wants_the_token_of_who_dials(certificates, token, caplog):
    caplog.set_level("INFO")
    theirs = Security(
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        token_file=token,
    )
    addresses: list[str] = []
    server = EnvironmentServer(
        lambda knows_truncation: counting_group(1), "127.0.0.1:0", security=theirs
    )
    with run_in_threads(lambda: server.run(addresses.append)):
        try:
            wait_until(lambda: bool(addresses))
            right = Security(tls_ca=certificates.path("ca.pem"), token_file=token)
            with learner(server_addresses=addresses, security=right) as it:
                it.wait_for_rollouts(1)
            wrong = dataclasses.replace(right, token_file=None)
            with learner(server_addresses=addresses, security=wrong) as it:
                wait_until(lambda: "The token must be this end's, got none" in caplog.text)
                assert it.gateways.num_streams == 0
        finally:
            server.stop()


def test_tokens_are_compared_whole():
    check_token("", "anything")
    check_token("secret", "secret")
    for given in ("", "secre", "secret2", "s\u00e9cret"):
        with pytest.raises(Refused, match="The token must be this end's"):
            check_token("secret", given)


def test_a_listening_socket_is_the_owners_and_takes_the_place_of_a_dead_one(tmp_path):
    import socket

    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with learner(listen=[f"unix:{path}"]) as it:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert try_to_play(it.address, Security()) == "played"
    assert not path.exists()
    remove_stale_socket(str(path))


def test_a_host_that_opens_too_many_streams_is_slowed_down():
    rate = ConnectionRate(Limits(connections_at_once=3, connections_per_s=0.001))
    for _ in range(3):
        rate.take("ipv4:10.0.0.1:5000")
    with pytest.raises(Refused, match=r"may open 0.001 streams a second, got more from ipv4:10"):
        rate.take("ipv4:10.0.0.1:5001")
    rate.take("ipv4:10.0.0.2:5000")


def test_a_host_that_calls_too_often_still_gets_its_connections(monkeypatch):
    now = 0.0
    monkeypatch.setattr("libtorchbeast.rpc.limits.time.monotonic", lambda: now)
    rate = ConnectionRate(Limits(connections_at_once=1, connections_per_s=200))
    num_granted = 0
    for millisecond in range(1000):
        now = millisecond / 1000
        with contextlib.suppress(Refused):
            rate.take("ipv4:10.0.0.1:5000")
            num_granted += 1
    assert num_granted == pytest.approx(200, rel=0.05)


def test_limits_are_positive():
    with pytest.raises(ValueError, match="max_streams must be more than 0, got 0"):
        Limits(max_streams=0)


def test_paths_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_secret(tmp_path / "token", "secret")
    assert Security(token_file=Path("~/token")).read_token() == "secret"


def test_a_token_with_half_a_character_is_a_wrong_one():
    with pytest.raises(Refused, match="The token must be this end's"):
        check_token("a secret", "\ud800")


def test_a_missing_list_of_revoked_names_is_one_sentence(certificates, token, tmp_path):
    security = Security(
        tls_ca=certificates.path("ca.pem"),
        tls_cert=certificates.path("learner.pem"),
        tls_key=certificates.path("learner.key"),
        tls_client_certs=True,
        revoked=tmp_path / "none",
        token_file=token,
    )
    with pytest.raises(ValueError, match="revoked must be a file that can be read"):
        EnvironmentServer(lambda _: counting_group(1), "127.0.0.1:0", security=security)


def test_a_token_file_is_read_when_it_changes_and_not_at_each_call(token, monkeypatch):
    reads = []
    read_token = Security.read_token
    monkeypatch.setattr(Security, "read_token", lambda self: reads.append(None) or read_token(self))
    check = CallerCheck(Security(token_file=token), is_learner_expected=False)
    for _ in range(3):
        check("a secret", {})
        with pytest.raises(Refused):
            check("a guess", {})
    assert len(reads) == 1
    write_secret(token, "another\n")
    check("another", {})
    assert len(reads) == 2


def test_a_certificate_that_cannot_be_revoked_is_refused_where_names_are(tmp_path):
    revoked = tmp_path / "revoked"
    revoked.touch()
    nameless = {"x509_pem_cert": [b"..."]}
    with pytest.raises(Refused, match="must have a name"):
        CallerCheck(Security(revoked=revoked), is_learner_expected=False)("", nameless)
    assert CallerCheck(Security(), is_learner_expected=False)("", nameless) == ""


def test_who_guesses_tokens_is_slowed_down(token):
    limits = Limits(connections_at_once=3, connections_per_s=0.001)  # one is the bystander's
    with under_attack(Security(token_file=token), limits=limits) as it:
        codes = [talk(it.address, [HELLO], token="a guess")[1] for _ in range(3)]
    assert codes == ["UNAUTHENTICATED", "UNAUTHENTICATED", "RESOURCE_EXHAUSTED"]


def test_a_lane_of_another_layout_is_not_mapped():
    lane = Lane.create(Spec(INT64), 1000)
    assert map_lane(os.dup(lane.fd), Spec(INT64), 10) is None
    same = map_lane(os.dup(lane.fd), Spec(INT64), 1000)
    assert same is not None
    same.close()
