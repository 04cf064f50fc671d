"""Runs with several learners: they learn, stop, restart and resume as one."""

import os
import re
import signal
import socket
import sys
from contextlib import ExitStack, suppress

import psutil
import pytest
import torch

from tests.helpers.ports import free_port
from tests.helpers.ranks import ranks_of
from tests.helpers.training import (
    ROOT,
    TIMEOUT_S,
    RemoteActors,
    RemoteEnvironments,
    Training,
    final_return,
    mean_return,
    read_connections,
    read_logs,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]

LAUNCH = (sys.executable, "-m", "torch.distributed.run")
TORCHRUN = (*LAUNCH, "--standalone", "--nproc_per_node", "2")
CATCH = ("--env", "Catch", "--learner_cpu_threads", "1")
ENDLESS = (*CATCH, "--total_steps", "100000000")


def own(output):
    """Without what torchrun logs itself: its agents may lose each other at the very end."""
    return "\n".join(x for x in output.splitlines() if not re.match(r"[EWI]\d{4} .*/torch/", x))


def saved_step(folder):
    return torch.load(folder / "model.tar", weights_only=True)["stats"]["step"]


def most_learners(folder):
    """In an update, mean over those of a row: one that stalls for a second is left out of some."""
    return max(float(row.get("num_learners") or 0) for row in read_logs(folder))


def test_two_learners_of_torchrun_make_one_run(tmp_path):
    args = (*CATCH, "--total_steps", "40000")
    prefix = (*TORCHRUN, "--no-python")
    with Training("polybeast", tmp_path, *args, prefix=prefix, cwd=ROOT) as training:
        assert training.process.wait(TIMEOUT_S) == 0, training.output
        assert "Traceback" not in own(training.output)
        assert "Warning" not in own(training.output)  # of PyTorch's, about what we do
        assert training.output.count("Training on Catch") == 1
    assert len(list(tmp_path.rglob("model.tar"))) == 1
    rows = read_logs(training.folder)
    assert int(rows[-1]["step"]) == saved_step(training.folder) >= 40000
    assert most_learners(training.folder) == 2
    assert int(rows[-1]["episodes"]) > 40000 / 9 / 2  # of both: each episode takes 9 steps


def test_two_machines_without_a_common_folder_make_one_run(tmp_path):
    """One torchrun for each of them, as docs/cluster.md has it."""
    nodes = []
    port = free_port()
    with ExitStack() as stack:
        for node in range(2):
            (tmp_path / f"node-{node}").mkdir()
            place = ("--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "1")
            where = ("--master_addr", "127.0.0.1", "--master_port", str(port))
            prefix = (*LAUNCH, *place, *where, "--no-python")
            args = (*CATCH, "--total_steps", "40000")
            training = Training(
                "polybeast", tmp_path / f"node-{node}", *args, prefix=prefix, cwd=ROOT
            )
            nodes.append(stack.enter_context(training))
        for node in nodes:
            assert node.process.wait(TIMEOUT_S) == 0, node.output
    first, second = nodes
    assert list(tmp_path.rglob("model.tar")) == [first.folder / "model.tar"]
    assert saved_step(first.folder) >= 40000
    assert most_learners(first.folder) == 2
    assert (second.folder / "rank-1" / "out.log").exists()
    assert "Traceback" not in own(first.output + second.output)
    assert "step" not in own(second.output)  # the first one speaks for both


def test_each_learner_has_actors_that_carry_the_model_at_a_port_of_its_own(tmp_path):
    port = two_free_ports()
    args = (*ENDLESS, "--listen", f"127.0.0.1:{port}")
    prefix = (*TORCHRUN, "--no-python")
    with Training("polybeast_learner", tmp_path, *args, prefix=prefix, cwd=ROOT) as training:
        folders = [training.folder, training.folder / "rank-1"]
        with ExitStack() as stack:
            for rank in range(2):
                place = tmp_path / f"actors-{rank}"
                place.mkdir()
                dial = ("--env", "Catch", "--connect", f"127.0.0.1:{port + rank}")
                actors = RemoteActors(place, *dial, "--num_actors", "1", "--envs_per_actor", "32")
                stack.enter_context(actors)
            training.wait_for(lambda: mean_return(training) > 0.6, "mean return above 0.6")
            training.wait_for(
                lambda: all(steps_of_actors(folder) > 5000 for folder in folders), "steps of both"
            )
            assert most_learners(training.folder) == 2
            second = next(p for p in training.family() if p.environ().get("RANK") == "1")
            os.kill(second.pid, signal.SIGTERM)
            assert training.process.wait(TIMEOUT_S) == 0, training.output
    assert "Traceback" not in own(training.output)
    assert list(tmp_path.rglob("model.tar")) == [training.folder / "model.tar"]


def two_free_ports():
    """The first of two neighbours."""
    while True:
        port = free_port()
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + 1))
            return port


def steps_of_actors(folder):
    """That a learner has learnt from."""
    rows = read_connections(folder)
    return sum(int(row["steps"]) for row in rows if row["name"] == "Catch actor 0")


def test_a_learner_that_is_killed_is_restarted_with_the_others_and_resumes(tmp_path):
    args = (*CATCH, "--total_steps", "60000", "--checkpoint_interval_s", "0.5")
    prefix = (*TORCHRUN, "--max-restarts", "1", "--no-python")
    with Training("polybeast", tmp_path, *args, prefix=prefix, cwd=ROOT) as training:
        training.wait_for_step(10000)
        victim = next(p for p in training.family() if p.environ().get("RANK") == "1")
        assert "torchbeast.polybeast" in victim.cmdline()
        os.kill(victim.pid, signal.SIGKILL)
        assert training.process.wait(TIMEOUT_S) == 0, training.output
    assert "Another learner has ended" in training.output
    assert training.output.count("Resuming at step") == 1
    assert saved_step(training.folder) >= 60000
    assert final_return(training.folder) > 0.6


def test_two_learners_of_monobeast_stop_together_and_one_goes_on(tmp_path):
    with ranks_of(2, "monobeast", tmp_path, *ENDLESS) as (first, second):
        first.wait_for(lambda: mean_return(first) > 0.7, "mean return above 0.7")
        os.kill(second.process.pid, signal.SIGTERM)
        assert first.process.wait(TIMEOUT_S) == second.process.wait(TIMEOUT_S) == 0
    assert "Stopped by SIGTERM" in first.output
    assert second.output == ""  # the first one speaks for both
    step = saved_step(first.folder)
    assert step == int(read_logs(first.folder)[-1]["step"])
    more = ("--total_steps", str(step + 3000), "--schedule", "constant")
    result = run("monobeast", tmp_path, "--xpid", "run", *CATCH, *more)
    assert result.returncode == 0, result.stderr
    assert f"Resuming at step {step:,}" in result.stdout
    assert saved_step(first.folder) >= step + 3000


def test_a_learner_without_environments_holds_nobody_up(tmp_path):
    """Even if it is the first, which reports."""
    address = f"unix:{tmp_path}/server"
    servers = f"{address}.nobody,{address}.0"  # one for each
    served = ("--env", "Catch", "--pipes_basename", address, "--num_servers", "1")
    args = (*ENDLESS, "--server_addresses", servers)
    with (
        RemoteEnvironments(tmp_path, *served, "--envs_per_server", "32", cwd=ROOT),
        ranks_of(2, "polybeast_learner", tmp_path, *args) as (first, second),
    ):
        first.wait_for_step(20000)
        assert "No rollouts from learner 0" in first.output
        assert most_learners(first.folder) == 1
        os.kill(first.process.pid, signal.SIGINT)
        assert first.process.wait(TIMEOUT_S) == second.process.wait(TIMEOUT_S) == 130
    assert "Stopped by SIGINT" in first.output


def test_a_learner_that_is_killed_ends_the_others_within_seconds(tmp_path):
    with ranks_of(2, "polybeast", tmp_path, *ENDLESS) as (first, second):
        first.wait_for_step(5000)
        family = first.family()[1:]
        os.kill(first.process.pid, signal.SIGKILL)
        assert second.process.wait(60) == 1
        assert "error (learner 1): Another learner has ended" in second.output
        assert "Traceback" not in own(second.output)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
