"""A fleet in Slurm: the script, tasks that submitit runs here, and a real slurmctld."""

import os
import signal
import stat
import subprocess
import sys

import psutil
import pytest

from tests.helpers.certificates import write_secret
from tests.helpers.fleet import fleet, running
from tests.helpers.remote import check_rollouts, learner
from tests.helpers.slurm import is_missing, slurm
from tests.helpers.threads import wait_until
from tests.helpers.training import ROOT, TIMEOUT_S
from torchbeast.fleet.__main__ import main
from torchbeast.fleet.flags import Flags
from torchbeast.fleet.slurm_jobs import JOBS, submit
from torchbeast.fleet.state import State, read

submitit = pytest.importorskip("submitit")

COUNTING = {"env": "tests.helpers.counting:Counting", "envs_per_server": 1}
ARGS = ("--launcher", "slurm", "--env", COUNTING["env"], "--envs_per_server", "1")


def write_program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Slurm's commands as a login node has them, which keep a script and its variables."""
    folder = tmp_path / "bin"
    write_program(folder / "srun", "exit 1")
    write_program(folder / "sbatch", f'cp "$1" {tmp_path}/script; env > {tmp_path}/variables\n'
                                     'echo "Submitted batch job 7"')  # fmt: skip
    write_program(folder / "squeue", f"cat {tmp_path}/queue")
    write_program(folder / "scancel", f'echo "$@" > {tmp_path}/cancelled; : > {tmp_path}/queue')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_the_script_asks_for_what_the_flags_say_and_holds_no_secret(sbatch, capsys):
    token = write_secret(sbatch / "token", "very secret")
    flags = ["--num_servers", "5", "--servers_per_task", "2", "--cpus_per_server", "1.5",
             "--memory_gb_per_server", "0.5", "--slurm_partition", "workers",
             "--slurm_time_min", "90", "--slurm_options", '{"qos": "low"}']  # fmt: skip
    where = ["--savedir", str(sbatch), "--connect", "127.0.0.1:1", "--token_file", str(token)]
    assert main([*ARGS, *flags, *where]) == 0
    lines = (sbatch / "script").read_text().splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert {"array=0-2%3", "cpus-per-task=3", "mem=1024MB", "partition=workers", "time=90",
            "qos=low", "requeue", "signal=USR2@90"} <= asked  # fmt: skip
    assert any(line.startswith("srun") and "--cpus-per-task 3" in line for line in lines)
    for path in [sbatch / "script", sbatch / "variables", *(sbatch / "fleet").rglob("*.*")]:
        assert b"very secret" not in path.read_bytes(), path
    assert read(sbatch / "fleet").handle == {"job": "7"}

    (sbatch / "queue").write_text("7_0|RUNNING|node3|None\n7_1|PENDING||Priority\n")
    capsys.readouterr()
    assert main(["status", "--savedir", str(sbatch)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].split() == ["0", "running", "node3", "-", "-"]
    assert shown[3].split() == ["1", "pending", "(Priority)", "-", "-", "-"]
    assert main([*ARGS, *where]) == 2
    assert "A fleet named fleet runs already" in capsys.readouterr().err
    assert main(["stop", "--savedir", str(sbatch)]) == 0
    assert (sbatch / "cancelled").read_text() == "7\n"
    assert read(sbatch / "fleet").is_stopped


def test_what_sbatch_refuses_is_one_sentence(sbatch, capsys):
    write_program(sbatch / "bin/sbatch", "echo invalid partition specified >&2; exit 1")
    where = ["--savedir", str(sbatch), "--connect", "127.0.0.1:1"]
    assert main([*ARGS, *where]) == 2
    assert "invalid partition specified" in capsys.readouterr().err
    assert main(["status", "--savedir", str(sbatch)]) == 0
    assert "fleet has ended." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_tasks_play_under_submitit_and_are_requeued_before_their_time_limit(tmp_path, monkeypatch):
    """With its local executor, which runs and signals tasks as Slurm does."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with learner(listen=["127.0.0.1:0"]) as it:
        flags = Flags(launcher="slurm", connect=it.address, num_servers=2, savedir=tmp_path,
                      **COUNTING)  # fmt: skip
        flags.folder.mkdir()
        State.of(flags).write(flags.folder)
        executor = submitit.LocalExecutor(flags.folder / JOBS)
        executor.update_parameters(timeout_min=60, stderr_to_stdout=True)
        # submitit cancels with it, and children of who ignores it, such as a shell's background
        # jobs, would ignore it, too.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        jobs = submit(flags, executor)
        signal.signal(signal.SIGINT, before)
        try:
            it.wait_for_environments(2)
            [task] = psutil.Process(int(jobs[0].job_id)).children()
            task.send_signal(submitit.JobEnvironment._usr_sig())
            it.wait_for_environments(3)  # a restart has an environment of its own
            assert "Requeued job" in jobs[0].stdout()
            assert all(job.state == "RUNNING" for job in jobs)
        finally:
            for job in jobs:
                job.cancel()
                job._process.wait(60)
    check_rollouts(it.rollouts, it.unroll_length)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(bool(is_missing()), reason=is_missing() or "Slurm is here")
def test_a_real_slurmctld_runs_requeues_and_ends_a_fleet(tmp_path):
    with slurm() as variables, learner(listen=["127.0.0.1:0"]) as it:
        token = write_secret(tmp_path / "token", "very secret")
        args = (*ARGS, "--name", "slurm3", "--num_servers", "3", "--connect", it.address,
                "--slurm_partition", "workers", "--memory_gb_per_server", "0.2",
                "--token_file", str(token))  # fmt: skip
        fleet(tmp_path, *args, env=variables)
        it.wait_for_environments(3)
        assert len(running(tmp_path, "slurm3", env=variables)) == 3
        job = read(tmp_path / "slurm3").handle["job"]
        requeue = ["scontrol", "requeue", f"{job}_1"]  # as preemption does
        subprocess.run(requeue, env=variables, check=True, timeout=60)
        it.wait_for_environments(4)
        wait_until(lambda: len(running(tmp_path, "slurm3", env=variables)) == 3)
        fleet(tmp_path, "stop", "--name", "slurm3", env=variables)
        it.wait_for_streams(0)
        assert "slurm3 has ended." in fleet(tmp_path, "status", "--name", "slurm3", env=variables)
    check_rollouts(it.rollouts, it.unroll_length)
    assert sys.executable in (tmp_path / f"slurm3/{JOBS}/{job}_submission.sh").read_text()
