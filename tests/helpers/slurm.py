"""Slurm on this machine, for tests: munged, slurmctld and slurmd with files of their own."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.helpers.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
SBIN = ("/usr/sbin", "/sbin")
START_S = 60.0

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits for as long as its credentials are good: 120 s by default.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=workers Nodes={host} MaxTime=INFINITE State=UP
"""


def find(program):
    return shutil.which(program, path=os.pathsep.join([os.environ["PATH"], *SBIN]))


def is_missing():
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"no {', '.join(missing)}: make test-packages"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


@contextlib.contextmanager
def slurm():
    """The variables of a process that uses it. Paths of sockets must be short."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True) as at,
        start_slurm(Path(at)) as variables,
    ):
        yield variables


@contextlib.contextmanager
def start_slurm(folder: Path):
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = {"controller_port": free_port(), "node_port": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, **ports))
    variables = {**os.environ, "SLURM_CONF": str(conf)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}",
             *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")),
             f"--socket={folder}/munge.sock"]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for command in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            stack.enter_context(daemon(command, variables))
            if command is munge:
                wait_for((folder / "munge.sock").exists, folder)
        wait_for(lambda: b"idle" in run(["sinfo", "--noheader"], variables), folder)
        try:
            yield variables
        finally:  # jobs outlive their daemons
            run(["scancel", "--full", "--signal=KILL", "--partition=workers"], variables)
            run(["scancel", "--partition=workers"], variables)
            wait_for(lambda: not run(["squeue", "--noheader"], variables), folder)


@contextlib.contextmanager
def daemon(command, variables):
    process = subprocess.Popen([find(command[0]), *command[1:]], env=variables,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def run(command, variables):
    return subprocess.run(
        command, env=variables, capture_output=True, timeout=START_S, check=False
    ).stdout


def wait_for(condition, folder):
    deadline = time.monotonic() + START_S
    while not condition():
        logs = [path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, "Slurm took too long:\n" + "\n".join(logs)
        time.sleep(0.1)
