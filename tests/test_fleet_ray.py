"""A fleet in a real Ray cluster on this machine: a head and two nodes that come and go."""

import contextlib
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.helpers.certificates import Certificates, write_secret
from tests.helpers.fleet import fleet, running
from tests.helpers.training import TIMEOUT_S, Training, listening_at, mean_return

ray_cluster = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]

STORE_BYTES = 80 << 20  # the least that Ray takes
TOKEN = "a-token-that-nobody-logs"
MORE_THAN_IS_ON_ITS_WAY = 2000  # steps


@contextlib.contextmanager
def cluster():
    """A head without room for tasks, with all its files in a folder, which has a short path: there
    are sockets in it. Also what says to our commands which cluster is the one of this machine."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        patch.setenv("RAY_TMPDIR", folder)
        it = ray_cluster.Cluster(initialize_head=True, head_node_args=options)
        stack.callback(it.shutdown)
        yield it, Path(folder)


def add_node(it):
    return it.add_node(num_cpus=4, object_store_memory=STORE_BYTES)


def tasks():
    """Processes of the fleet's tasks; Ray names them after their class."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == ["ray::RayTask"]:
                found.add(process)
    return found


def learn_on(training):
    training.wait_for_step(training.step + MORE_THAN_IS_ON_ITS_WAY)


def test_eight_environments_in_ray_train_catch_and_a_killed_worker_and_node_are_replaced(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    certificates = Certificates.make(tmp_path / "keys")
    token = write_secret(tmp_path / "token", TOKEN)
    listen = ("--listen", "127.0.0.1:0", "--token_file", str(token),
              "--tls_cert", str(certificates.path("learner.pem")),
              "--tls_key", str(certificates.path("learner.key")))  # fmt: skip
    catch = ("--env", "Catch", "--total_steps", "100000000", "--unroll_length", "16",
             "--batch_size", "32", "--num_minibatches", "4")  # fmt: skip
    with (
        cluster() as (nodes, folder),
        Training("polybeast_learner", tmp_path, *catch, *listen) as training,
    ):
        training.wait_for(lambda: listening_at(training), "address")
        dial = ("--connect", listening_at(training), "--token_file", str(token),
                "--tls_ca", str(certificates.path("ca.pem")))  # fmt: skip
        shape = ("--env", "Catch", "--num_servers", "4", "--envs_per_server", "2")
        address = ("--launcher", "ray", "--ray_address", nodes.address, "--name", "rays")
        fleet(tmp_path, *address, *shape, *dial)
        assert fleet(tmp_path, "status", "--name", "rays").count("pending") == 4  # for a node

        first = add_node(nodes)
        training.wait_for_step(1)
        training.wait_for(lambda: len(tasks()) == 4, "four tasks")
        before = tasks()
        learn_on(training)

        before.copy().pop().kill()
        training.wait_for(lambda: len(tasks() - before) == 1, "a task in its place")
        learn_on(training)

        add_node(nodes)
        nodes.remove_node(first, allow_graceful=False)
        training.wait_for(lambda: len(tasks()) == 4 and not tasks() & before, "four others")
        training.wait_for(lambda: len(running(tmp_path, "rays")) == 4, "servers in all of them")
        hosts = [host for task in tasks() for host in task.children()]
        assert len(hosts) == 4
        learn_on(training)
        training.wait_for(lambda: mean_return(training) > 0, "more balls caught than lost")

        fleet(tmp_path, "stop", "--name", "rays")
        psutil.wait_procs(hosts, timeout=30)
        assert not any(host.is_running() for host in hosts)
        assert "rays has ended." in fleet(tmp_path, "status", "--name", "rays")
        assert training.end(signal.SIGTERM) == 0
        assert not who_knows(TOKEN, folder)


def who_knows(text, folder):
    """Files of Ray, its logs among them, that hold a text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".err" for path in files)
    return [path for path in files if text.encode() in path.read_bytes()]
