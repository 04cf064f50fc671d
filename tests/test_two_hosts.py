"""Training across two hosts, environments behind a NAT, with TLS and a token."""

import signal
import time

import pytest

from tests.helpers.certificates import Certificates, write_secret
from tests.helpers.hosts import ENVIRONMENTS, LEARNER, ROUTER_OUTSIDE, two_hosts
from tests.helpers.training import (
    MORE_THAN_IS_ON_ITS_WAY,
    TIMEOUT_S,
    RemoteEnvironments,
    Training,
    mean_return,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]

CABLE_PULLED_S = 20.0


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        yield hosts


def test_catch_is_learnt_through_a_nat_and_a_pulled_cable_does_no_harm(hosts, tmp_path):
    certificates = Certificates.make(tmp_path, LEARNER)
    token = tmp_path / "token"
    write_secret(token, "a secret of both hosts")
    address = f"{LEARNER}:4242"
    learner_args = ("--env", "Catch", "--total_steps", "100000000", "--listen", address,
                    "--tls_cert", certificates.path("learner.pem"),
                    "--tls_key", certificates.path("learner.key"),
                    "--token_file", token)  # fmt: skip
    env_args = ("--env", "Catch", "--num_servers", "2", "--connect", address,
                "--tls_ca", certificates.path("ca.pem"), "--token_file", token)  # fmt: skip
    with (
        Training("polybeast_learner", tmp_path, *map(str, learner_args),
                 prefix=hosts.within(hosts.learner)) as training,
        RemoteEnvironments(tmp_path, *map(str, env_args),
                           prefix=hosts.within(hosts.environments)) as environments,
    ):  # fmt: skip
        training.wait_for_step(1)
        assert hosts.peers_of_learner() == {ROUTER_OUTSIDE}
        assert not hosts.has_route(hosts.learner, ENVIRONMENTS)
        training.wait_for(lambda: mean_return(training) >= 0.9, "mean return of 0.9")

        processes = [p.pid for p in training.family() + environments.family()]
        hosts.pull_cable()
        step = pause_while_cable_is_pulled(training)
        hosts.plug_cable()
        training.wait_for_step(step + 20_000)
        assert [p.pid for p in training.family() + environments.family()] == processes
        assert mean_return(training) >= 0.9
        assert training.end(signal.SIGTERM) == 0
        assert environments.end(signal.SIGTERM) == 0
        assert "Traceback" not in training.output + environments.output


def pause_while_cable_is_pulled(training: Training) -> int:
    """See that training stands still; returns the step."""
    pulled_at = time.monotonic()
    time.sleep(CABLE_PULLED_S / 2)  # the length of the fault, not a wait for something
    step = training.step
    time.sleep(max(0.0, pulled_at + CABLE_PULLED_S - time.monotonic()))
    # Open rollouts are padded and learnt from when their streams are given up.
    assert training.step < step + MORE_THAN_IS_ON_ITS_WAY
    return step
