"""A fleet in a Ray cluster: each task is a detached Ray actor.

Ray restarts it, on another node if need be, when its process or its node is gone. While no node has
room for it, it is pending, and an autoscaler may add a node.
"""

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libtorchbeast import secret
from libtorchbeast.shared_memory import anonymous_memory
from libtorchbeast.supervisor import NobodyLeft, Supervisor
from torchbeast.errors import UsageError
from torchbeast.fleet.flags import Flags, TaskFlags
from torchbeast.fleet.state import State, TaskStatus
from torchbeast.fleet.task import log_to_stderr, run_task, split

logger = logging.getLogger("torchbeast")

NAMESPACE = "torchbeast"
CONNECT_S = 120.0
QUIET_S = 2.0  # without an answer, after which the other actors count as pending
TIDY_S = 8.0  # for a task's servers to end, before Ray kills their process
MAX_LINE = 200
FILES = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, repr=False)
class Secrets:
    """Token and certificates, read where the fleet is started, as arguments of Ray's actors.

    Neither Ray nor we log them; nodes need no files of their own.
    """

    token: str
    files: dict[str, bytes]

    @classmethod
    def of(cls, flags: Flags) -> "Secrets":
        paths = {name: getattr(flags, name) for name in FILES}
        files = {name: path.expanduser().read_bytes() for name, path in paths.items() if path}
        return cls(flags.read_token(), files)

    def unpack(self, flags: TaskFlags) -> TaskFlags:
        """Put them into this process's memory, and not on disk; returns flags that find them."""
        secret.keep(self.token)
        paths: dict[str, Any] = {"token_file": None}
        for name, data in self.files.items():
            fd = anonymous_memory(len(data), f"torchbeast-{name}")
            os.pwrite(fd, data, 0)
            paths[name] = Path(f"/proc/{os.getpid()}/fd/{fd}")
        return dataclasses.replace(flags, **paths)


class RayTask:
    """One task, in a process that Ray has started."""

    def __init__(self, flags: TaskFlags, secrets: Secrets) -> None:
        import ray

        log_to_stderr()
        self._is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        self._flags = secrets.unpack(flags)
        self._is_stopping = threading.Event()
        self._problem = ""
        self._running = self._restarts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, Any]:
        """The fields of its `TaskStatus`."""
        where = f"{socket.gethostname()}, process {os.getpid()}"
        return {
            "state": f"cannot work: {self._problem}" if self._problem else "running",
            "where": where,
            "servers": f"{self._running} of {self._flags.num_servers}",
            "restarts": str(self._restarts),
        }

    def stop(self) -> None:
        """End the task's servers tidily."""
        self._is_stopping.set()
        self._thread.join(TIDY_S)

    def _run(self) -> None:
        try:
            code = run_task(self._flags, self._is_restart, self._note)
            self._problem = "its servers have ended; its log says why" if code else ""
        except (UsageError, NobodyLeft) as error:  # shown until the fleet is stopped
            self._problem = str(error).strip().splitlines()[-1]
            logger.error("%s", error)
        except BaseException:
            logger.exception("This task ends, and Ray restarts it.")
            os._exit(1)

    def _note(self, servers: Supervisor) -> bool:
        self._running, self._restarts = len(servers.processes), servers.num_restarts
        return not self._is_stopping.is_set()


def start(flags: Flags, state: State) -> int:
    with _cluster(flags.ray_address) as ray:
        options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": flags.cpus_per_task,
            "scheduling_strategy": flags.ray_placement,
        }
        if flags.memory_gb_per_task is not None:
            options["memory"] = int(flags.memory_gb_per_task * 2**30)
        if resources := flags.read_json("ray_resources"):
            options["resources"] = resources
        if runtime_env := flags.read_json("ray_runtime_env"):
            options["runtime_env"] = runtime_env
        state.handle = {"address": flags.ray_address}
        state.write(flags.folder)
        secrets = Secrets.of(flags)
        try:
            task = ray.remote(RayTask)
            for number, share in enumerate(split(flags)):
                name = _name(flags.name, number)
                task.options(name=name, **options).remote(share, secrets)
        except ValueError as error:  # a name that is taken, a resource that is no number
            raise UsageError(f"Ray takes other options, got {error}.") from error
    print(f"{flags.num_tasks} tasks wait for room in the Ray cluster, or run already; see\n"
          f"  python -m torchbeast.fleet status --name {flags.name}")  # fmt: skip
    return 0


def status(state: State, folder: Path) -> list[TaskStatus]:
    with _cluster(state.handle["address"]) as ray:
        actors = _actors(ray, state)
        found = dict.fromkeys(actors, TaskStatus("", "pending or restarting"))
        for number, figures in _ask(ray, actors).items():
            found[number] = TaskStatus("", **figures)
        return [found[number]._replace(task=str(number)) for number in sorted(found)]


def stop(state: State, folder: Path) -> None:
    with _cluster(state.handle["address"]) as ray:
        actors = _actors(ray, state)
        calls = [actors[number].stop.remote() for number in _ask(ray, actors)]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=TIDY_S + QUIET_S)
        for actor in actors.values():
            ray.kill(actor, no_restart=True)


def _ask(ray: Any, actors: dict[int, Any]) -> dict[int, dict[str, Any]]:
    """The figures of running actors, or why there are none; pending ones do not answer."""
    calls = {actor.figures.remote(): number for number, actor in actors.items()}
    waiting, found = list(calls), {}
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=QUIET_S)
        for call in done:
            try:
                found[calls[call]] = ray.get(call)
            except ray.exceptions.RayError as error:  # it is restarting, or never works
                [line, *_] = str(error).splitlines() or [type(error).__name__]
                found[calls[call]] = {"state": f"no answer ({line[:MAX_LINE]})"}
        if not done:
            break
    return found


def _actors(ray: Any, state: State) -> dict[int, Any]:
    """The fleet's actors that are running or pending, by number."""
    found = {}
    for number in range(state.num_tasks):
        with contextlib.suppress(ValueError):  # Ray's error for an unknown name
            found[number] = ray.get_actor(_name(state.name, number), NAMESPACE)
    return found


def _name(fleet: str, number: int) -> str:
    return f"{fleet}/{number}"


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster and yield `ray`; actors outlive the connection."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--launcher ray needs the package ray; install it with `pip install 'torchbeast[ray]'`."
        ) from error
    too_late = threading.Timer(CONNECT_S, _give_up, [address])  # Ray itself has no time limit
    too_late.daemon = True
    too_late.start()
    try:
        ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        raise UsageError(
            f"There must be a Ray cluster at {address}, got {error}; start one with `ray start "
            "--head`, or give --ray_address."
        ) from error
    finally:
        too_late.cancel()
    try:
        yield ray
    finally:
        ray.shutdown()


def _give_up(address: str) -> None:
    print(f"error: The Ray cluster at {address} must answer within {CONNECT_S:.0f} s, and has not; "
          "see `ray status`.", file=sys.stderr, flush=True)  # fmt: skip
    os._exit(2)
