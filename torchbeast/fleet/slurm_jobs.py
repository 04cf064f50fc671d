"""A fleet in Slurm: an array job made by submitit, whose tasks are requeued.

A task goes back into the queue before its time limit (submitit's checkpoint) and when it is
preempted or its node fails (sbatch's --requeue), until the fleet is stopped.
"""

import dataclasses
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from libtorchbeast.supervisor import NobodyLeft
from torchbeast.errors import UsageError
from torchbeast.fleet import state as states
from torchbeast.fleet.flags import Flags, TaskFlags
from torchbeast.fleet.state import State, TaskStatus
from torchbeast.fleet.task import log_to_stderr, run_task, split

JOBS = "jobs"  # subfolder of scripts and logs
MAX_REQUEUES = 10**6
KILL_S = 900.0  # time within which Slurm sends SIGKILL after SIGTERM
COMMAND_S = 60.0
STOP_S = 120.0
GONE = "Invalid job id"
FORMAT = "%i|%T|%N|%r"


@dataclasses.dataclass
class SlurmTask:
    """One task; submitit calls it in a process that Slurm has started."""

    flags: TaskFlags
    folder: Path
    """The fleet's folder."""
    is_restart: bool = False

    def __call__(self) -> int:
        log_to_stderr()
        is_restart = self.is_restart or int(os.environ.get("SLURM_RESTART_COUNT") or 0) > 0
        try:
            code = run_task(self.flags, is_restart, lambda servers: True)
        except (UsageError, NobodyLeft) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        if code:
            raise SystemExit(code)
        self._wait_to_be_killed()
        return code

    def checkpoint(self) -> Any:
        """Called by submitit before the time limit; returns what to run after the requeue."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(dataclasses.replace(self, is_restart=True))

    def _wait_to_be_killed(self) -> None:
        """After SIGTERM, wait for SIGKILL unless the fleet is stopped: Slurm requeues only tasks
        that it had to kill."""
        deadline = time.monotonic() + KILL_S
        while not states.read(self.folder).is_stopped and time.monotonic() < deadline:
            time.sleep(1)


def make_executor(flags: Flags) -> Any:
    """submitit's executor with the resources that the flags ask for."""
    submitit = _submitit()
    try:
        executor = submitit.SlurmExecutor(flags.folder / JOBS, max_num_timeout=MAX_REQUEUES)
    except RuntimeError as error:
        raise UsageError(
            "--launcher slurm needs Slurm's commands on this machine, and there is no srun; run "
            "it on one of the cluster's login nodes."
        ) from error
    cpus = math.ceil(flags.cpus_per_task)
    memory_gb = flags.memory_gb_per_task
    executor.update_parameters(
        job_name=f"torchbeast-{flags.name}",
        time=flags.slurm_time_min,
        cpus_per_task=cpus,
        srun_args=["--cpus-per-task", str(cpus)],  # from Slurm 22.05 on, srun does not inherit it
        array_parallelism=flags.num_tasks,
        stderr_to_stdout=True,
        additional_parameters={"requeue": True, **flags.read_json("slurm_options")},
        **({"partition": flags.slurm_partition} if flags.slurm_partition else {}),
        **({"mem": f"{math.ceil(1024 * memory_gb)}MB"} if memory_gb is not None else {}),
    )
    return executor


def submit(flags: Flags, executor: Any) -> list[Any]:
    """Submit all tasks as one array job; returns submitit's jobs, one for each task."""
    with executor.batch():
        return [executor.submit(SlurmTask(share, flags.folder)) for share in split(flags)]


def start(flags: Flags, state: State) -> int:
    executor = make_executor(flags)
    state.write(flags.folder)  # tasks read it
    try:
        jobs = submit(flags, executor)
    except _submitit().core.utils.FailedJobError as error:
        raise UsageError(f"Slurm must take the job, and sbatch says: {error}") from error
    state.handle = {"job": jobs[0].job_id.partition("_")[0]}
    state.write(flags.folder)
    print(f"Slurm's job {state.handle['job']} has {flags.num_tasks} tasks; see\n"
          f"  python -m torchbeast.fleet status --name {flags.name}\n"
          f"and their logs in {flags.folder / JOBS}")  # fmt: skip
    return 0


def status(state: State, folder: Path) -> list[TaskStatus]:
    if "job" not in state.handle:  # sbatch has failed
        return []
    job = state.handle["job"]
    command = ["squeue", "--noheader", "--array", f"--jobs={job}", f"--format={FORMAT}"]
    found = []
    for line in _run(command, ok=GONE).splitlines():
        task, word, node, reason = line.split("|")
        shown = word.lower() + (f" ({reason})" if reason != "None" else "")
        found.append(TaskStatus(task.partition("_")[2] or "0", shown, node or "-"))
    return sorted(found, key=lambda status: int(status.task))


def stop(state: State, folder: Path) -> None:
    if "job" not in state.handle:
        return
    dataclasses.replace(state, is_stopped=True).write(folder)  # so that tasks end after SIGTERM
    _run(["scancel", state.handle["job"]], ok=GONE)
    deadline = time.monotonic() + STOP_S
    while status(state, folder):
        if time.monotonic() > deadline:
            raise UsageError(
                f"Slurm must end job {state.handle['job']} within {STOP_S:.0f} s, and it has not; "
                f"see `squeue --jobs={state.handle['job']}`."
            )
        time.sleep(1)


def _run(command: list[str], ok: str) -> str:
    """Run a command; returns its output, or nothing if it fails with the words `ok`."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"Slurm's {command[0]} must answer, got {error}.") from error
    if result.returncode and ok not in result.stderr:
        raise UsageError(f"Slurm's {command[0]} must answer, got {result.stderr.strip()}.")
    return result.stdout if not result.returncode else ""


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise UsageError(
            "--launcher slurm needs the package submitit; install it with `pip install "
            "'torchbeast[slurm]'`."
        ) from error
    return submitit
