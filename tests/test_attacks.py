"""Attacks, each as somebody with bad intentions would make it; who plays beside them goes on.

Here: whoever reaches the port and has no token; and checkpoints, beside which nobody plays. Others:

    test_attacks_with_the_token.py    clients that may dial, and servers that the learner dials
    test_attacks_on_environments.py   the other way round: learners that mean no good
    test_attacks_on_keys.py           certificates and tokens that were stolen, or are replaced
    test_attacks_at_restarts.py       herds, learners that end, ends that are not of one age
"""

import concurrent.futures
import functools
import re
import shlex
import signal
from pathlib import Path

import grpc
import pytest
import torch

from libtorchbeast.rpc.limits import Limits, host_of
from libtorchbeast.rpc.security import Security
from tests.helpers.attacks import FakeProxy, grows_by_less_than, silent_streams, under_attack
from tests.helpers.remote import check_rollouts, serving
from tests.helpers.saved_run import save_run
from tests.helpers.threads import wait_until
from tests.helpers.training import run as run_program
from tests.test_rpc_bad_peers import talk
from tests.test_rpc_security import try_to_play
from torchbeast.run import checkpoint


@pytest.fixture
def proxy(monkeypatch):
    """All that the environment can say about proxies names this one."""
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with FakeProxy.running() as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        yield proxy


def test_each_line_of_the_docs_table_names_tests_that_are_there():
    tests = Path(__file__).parent
    text = (tests.parent / "docs" / "remote.md").read_text()
    _, _, table = text.partition("| who | what it can do at worst |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    assert len(lines) > 15
    attacks = "".join(path.read_text() for path in tests.glob("test_attacks*.py"))
    for line in lines:
        named = re.findall(r"`(test_\w+)`(?: \(`(test_\w+\.py)`\))?", line)
        assert named, line
        for name, file in named:
            text = (tests / file).read_text() if file else attacks
            assert f"def {name}(" in text, name


# ------------------------------------------------------------------------------ without the token


def test_a_proxy_of_the_environment_gets_nothing_of_a_loopback_connection(token, proxy):
    with under_attack(token) as it:
        assert try_to_play(it.address, token) == "played"
        by_name = it.address.replace("127.0.0.1", "localhost")
        assert try_to_play(by_name, token) == "played"
    assert proxy.received == []


def test_a_proxy_gets_nothing_when_the_learner_dials(token, proxy):
    with (
        serving("127.0.0.1:0", security=token) as server,
        under_attack(token, server_addresses=[server.server_address]) as it,
    ):
        it.wait_for_environments(3)
    check_rollouts(it.rollouts, it.unroll_length)
    assert proxy.received == []


def test_without_tls_no_token_leaves_the_machine(token):
    insecure = Security(token_file=token.token_file, insecure=True)
    for check in (insecure.check_dialing, insecure.check_listening):
        with pytest.raises(ValueError, match=r"over TLS only, and 192.0.2.7:4242 has none; give"):
            check("192.0.2.7:4242")
        check("127.0.0.1:4242")
        check("unix:/tmp/socket")


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_large_messages_without_the_token_take_no_memory(token, compression):
    """They are not read: 640 MiB in 20 streams, or a few KiB that are as large in memory."""
    large = bytes(32 << 20)
    with under_attack(token) as it, grows_by_less_than(128, it.gateways.pids[0]):
        attack = functools.partial(
            talk, it.address, [large], token="guessed", compression=compression
        )
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            attacks = [pool.submit(attack) for _ in range(20)]
            it.bystander.plays_on()
            ended = [future.result() for future in attacks]
    expected = "UNAUTHENTICATED" if compression is None else "UNIMPLEMENTED"
    assert {code for _, code, _ in ended} == {expected}


def test_who_has_no_token_takes_no_place(token):
    limits = Limits(max_streams=2, max_introductions=2, handshake_s=60.0)
    with under_attack(token, limits=limits) as it, silent_streams(it.address, 40) as calls:
        wait_until(lambda: not any(call.is_active() for call in calls))
        assert {call.code().name for call in calls} == {"UNAUTHENTICATED"}
        assert try_to_play(it.address, token) == "played"
        it.bystander.plays_on()


def test_a_network_counts_as_one_host():
    mapped = "ipv6:%5B::ffff:10.0.0.7%5D:5000"
    assert host_of("ipv4:10.0.0.7:4000") == host_of(mapped) == "ipv4:10.0.0.7"
    first = host_of("ipv6:%5B2001:db8:1:2::7%5D:4000")
    assert first == host_of("ipv6:[2001:db8:1:2:aaaa::8]:5000") == "ipv6:2001:db8:1:2::/64"
    assert first != host_of("ipv6:%5B2001:db8:1:3::7%5D:4000")
    assert host_of("unix:") == "unix:"


def test_gateways_are_the_first_that_the_kernel_kills(token):
    with under_attack(token) as it:
        [pid] = it.gateways.pids
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("env", -signal.SIGABRT), ("model", 2)])
@pytest.mark.parametrize("mode", ["train", "test"])
def test_code_that_a_checkpoint_names_does_not_run(tmp_path, mode, name, code):
    """Unless the command line names it, too, as the command to copy does (it is no model)."""
    flags, _ = save_run(tmp_path, env="Catch")
    path = flags.rundir / checkpoint.FILE_NAME
    contents = torch.load(path, weights_only=True)
    contents["flags"][name] = "os:abort"
    torch.save(contents, path)
    args = ["--savedir", str(tmp_path), "--xpid", "run", "--mode", mode]
    refused = run_program("monobeast", tmp_path, *args[2:])
    assert refused.returncode == 2
    _, _, to_copy = refused.stderr.partition("a checkpoint cannot run code; name it, too: ")
    assert shlex.split(to_copy)[-8:] == [*args, f"--{name}", "os:abort"]
    named = run_program("monobeast", tmp_path, *args[2:], f"--{name}", "os:abort")
    assert named.returncode == code, named.stderr
    assert ("--model os:abort takes ()" in named.stderr) == (name == "model")
