"""Attacks, each as somebody with bad intentions would make it; who plays beside them goes on."""

import pytest

from libtorchbeast.rpc.security import Security
from tests.helpers.attacks import FakeProxy, under_attack
from tests.helpers.certificates import write_secret
from tests.helpers.remote import check_rollouts, learner, serving
from tests.helpers.threads import wait_until
from tests.test_rpc_security import try_to_play


@pytest.fixture
def token(tmp_path):
    return Security(token_file=write_secret(tmp_path / "token", "secret"))


@pytest.fixture
def proxy(monkeypatch):
    """All that the environment can say about proxies names this one."""
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FakeProxy.running() as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        yield proxy


# ------------------------------------------------------------------------------ without the token


def test_a_proxy_of_the_environment_gets_nothing_of_a_loopback_connection(token, proxy):
    with under_attack(token) as it:
        assert try_to_play(it.address, token) == "played"
        by_name = it.address.replace("127.0.0.1", "localhost")
        assert try_to_play(by_name, token) == "played"
    assert proxy.received == []


def test_a_proxy_gets_nothing_when_the_learner_dials(token, proxy):
    with serving("127.0.0.1:0", security=token) as server:
        wait_until(lambda: not server.server_address.endswith(":0"))
        with learner(server_addresses=[server.server_address], security=token) as it:
            it.wait_for_rollouts(3)
    check_rollouts(it.rollouts, it.unroll_length)
    assert proxy.received == []


def test_without_tls_no_token_leaves_the_machine(token):
    insecure = Security(token_file=token.token_file, insecure=True)
    for check in (insecure.check_dialing, insecure.check_listening):
        with pytest.raises(ValueError, match=r"over TLS only, and 192.0.2.7:4242 has none; give"):
            check("192.0.2.7:4242")
        check("127.0.0.1:4242")
        check("unix:/tmp/socket")
