"""A host: the process that steps environments, wherever their learner is.

    play   the one loop: rows are shown over a link, actions come back, the group takes a step

Links are lanes (lane_scheduler.py) and gRPC streams in either direction (rpc/grpc_streams.py).
This file and groups.py have what is the same on all links: seeds, and what happens when an
environment raises or hangs.

Started by a supervisor as `python -m libtorchbeast.env_host CONFIG`: with lanes it is a worker of
the learner on this machine; with an address it listens there for a learner, or dials one. It
imports no torch, and grpc only if an address needs it.
"""

import dataclasses
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from libtorchbeast.episode_info import InfoSums
from libtorchbeast.groups import HEARTBEAT, Broken, Group, describe_failure, make_environments
from libtorchbeast.helper_process import SupervisorLine
from libtorchbeast.rows import Row, Spec, without_truncation
from libtorchbeast.seeding import derive_seed
from libtorchbeast.specs import ArraySpec, count_actions
from libtorchbeast.supervisor import CANNOT_WORK, NEVER_WORKED, NO_ROOM
from libtorchbeast.tree import leaves_of

if TYPE_CHECKING:
    from libtorchbeast.rpc.security import Security

# The niceness of workers, which share their cores with the learner: if the learner waits for a
# core, all other processes soon wait for the learner. On two cores Pong makes 16% more steps a
# second with 5 than with 0, and 6% more with 10 than with 0.
NICENESS = 5


class BadAnswer(Exception):
    """An agent sent invalid actions; they are not passed to the environments."""


class Link(Protocol):
    """A connection to an agent, which takes rows and returns actions."""

    async def show(self, row: Row, info: InfoSums) -> Any:
        """Send a row and return the agent's actions for it; raise when the link has ended.

        `info` is of the episodes that ended in this step. It may arrive later than the row.
        """


async def play(
    group: Group,
    link: Link,
    beat: Callable[[], None] = lambda: None,
    knows_truncation: bool = True,
) -> None:
    """Step a group with an agent's actions until the link ends; call `beat` after each step.

    Raises `BadAnswer` if an action is invalid; the environments keep their episodes.
    """
    check = ActionCheck(group.spec.action)
    row = group.start()
    while True:
        shown = row if knows_truncation else without_truncation(row)
        actions = await link.show(shown, group.take_info())
        check(actions)
        row = group.step(actions)
        beat()


class ActionCheck:
    """Raises `BadAnswer` for actions out of range. Dtypes and shapes are checked by links."""

    def __init__(self, spec: Any) -> None:
        self._num_actions = count_actions(spec)
        self._is_fast = self._num_actions > 0 and spec.dtype == "int64"
        self._leaves = [leaf for _, leaf in leaves_of(spec)]

    def __call__(self, actions: Any) -> None:
        if self._is_fast:
            # For a short list, Python's min and max are faster than NumPy's.
            numbers = actions if type(actions) is list else actions.tolist()
            if min(numbers) < 0 or max(numbers) >= self._num_actions:
                self._check_leaf(self._leaves[0], np.asarray(actions))
            return
        for leaf, (_, array) in zip(self._leaves, leaves_of(actions), strict=True):
            self._check_leaf(leaf, array)

    def _check_leaf(self, leaf: ArraySpec, array: np.ndarray) -> None:
        """Check that categories are in range and floats finite (clipped later, see specs.py)."""
        if leaf.num_categories:
            largest = np.reshape(leaf.num_categories, leaf.shape) - 1
            bad = (array < 0) | (array > largest)
            if bad.any():
                most = np.broadcast_to(largest, array.shape)[bad][0]
                raise BadAnswer(f"An action must be from 0 to {most}, got {array[bad][0]}.")
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            raise BadAnswer("The numbers of an action must be finite, got one that is not.")


@dataclass(frozen=True)
class HostConfig:
    """The configuration of a host, passed to its process as JSON."""

    name: str
    factory: str
    """`package.module:function`, called with num_envs, seed and `factory_options`, and with `data`
    (bytes) if the parent process has sent any."""
    factory_options: dict[str, Any]
    num_envs: int
    """The number of environments in a group."""
    num_groups: int
    seed: int
    lane_fds: list[int] = field(default_factory=list)
    """Descriptors of a worker's lanes, one for each group; `spec` is that of each environment."""
    spec: Any = None
    address: str = ""
    """For a host without lanes: the address to listen at, or to dial."""
    dial: bool = False
    is_first_start: bool = True
    """False after a restart: the address could be used before, so failing now is worth a retry."""
    security: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def make_group(
        self, number: int, beat: Callable[[], None], rebuild: bool = True, data: bytes = b""
    ) -> Group:
        """Make the group with this number, with its own seed; `data` goes to the factory."""
        options = {**self.factory_options, **({"data": data} if data else {})}

        def make(seed: int) -> Any:
            HEARTBEAT.set(beat)
            beat()  # the watchdog's time for making them begins now
            return make_environments(self.factory, self.num_envs, seed, **options)

        group = Group(make, derive_seed(self.seed, number), rebuild)
        beat()
        return group


def run_worker(config: HostConfig, line: SupervisorLine) -> None:
    """Be a worker: play on the learner's lanes until they are closed."""
    os.nice(NICENESS)
    from libtorchbeast.lane_scheduler import LaneLink, LaneScheduler
    from libtorchbeast.shared_lanes import Lane, LaneClosed

    spec = Spec.from_json(config.spec)
    scheduler = LaneScheduler(line.tick)

    async def work(lane: Lane, group: Group) -> None:
        link = LaneLink(lane)
        try:
            await link.attach()
            lane.name = config.name
            await play(group, link, line.beat)
        except LaneClosed:
            pass
        finally:
            group.close()

    lanes = [Lane(fd, spec, config.num_envs) for fd in config.lane_fds]
    groups = [config.make_group(i, line.beat, data=line.data) for i in range(len(lanes))]
    for lane, group in zip(lanes, groups, strict=True):
        scheduler.add(work(lane, group))
    scheduler.run()


def run_at_address(config: HostConfig, line: SupervisorLine) -> None:
    """Listen for a learner, or dial one, until SIGTERM."""
    from libtorchbeast.rpc.security import Security

    run = run_client if config.dial else run_server
    run(config, line, Security.from_json(config.security))


def run_client(config: HostConfig, line: SupervisorLine, security: "Security") -> None:
    """Dial a learner. Raises `FalseStart` if the environments failed and have never worked."""
    from libtorchbeast.rpc.env_client import EnvironmentClient

    groups: list[Group] = []

    def maker(number: int) -> Callable[[], Group]:
        def make() -> Group:
            groups.append(config.make_group(number, line.beat))
            return groups[-1]

        return make

    makers = [maker(i) for i in range(config.num_groups)]
    client = EnvironmentClient(makers, config.address, config.name, security, line.tick)
    signal.signal(signal.SIGTERM, lambda *_: client.stop())
    try:
        client.run()
    except Exception as error:
        if not is_false_start(error, groups, config.num_groups):
            raise
        raise FalseStart from error


def run_server(config: HostConfig, line: SupervisorLine, security: "Security") -> None:
    """Listen for a learner. Exit with `CANNOT_WORK` if the first start cannot use the address."""
    from libtorchbeast.rpc.env_server import EnvironmentServer

    numbers = itertools.count()

    def make_group(knows_truncation: bool) -> Group:
        return config.make_group(next(numbers), line.beat, rebuild=knows_truncation)

    server = EnvironmentServer(
        make_group,
        config.address,
        config.name,
        security,
        num_streams=config.num_groups,
        tick=line.tick,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    listening: list[str] = []
    try:
        server.run(listening.append)
    except (OSError, ValueError) as error:
        has_room = getattr(error, "errno", None) not in NO_ROOM
        if listening or not config.is_first_start or not has_room:
            raise
        line.send(logging.ERROR, f"error: {error}")
        sys.exit(CANNOT_WORK)


class FalseStart(Exception):
    """The environments have never worked in this process; the cause says why."""


def is_false_start(error: Exception, groups: list[Group], num_groups: int) -> bool:
    """Whether the environments have caused `error` and have never worked in this process."""
    if len(groups) == num_groups:
        return isinstance(error, Broken) and not any(group.has_worked for group in groups)
    return getattr(error, "errno", None) not in NO_ROOM and not isinstance(error, MemoryError)


def main(text: str) -> None:
    values = json.loads(text)
    line = SupervisorLine(values.pop("line"))
    config = HostConfig(**values)
    run = run_worker if config.lane_fds else run_at_address
    run_and_exit(lambda: run(config, line), line)


def run_and_exit(run: Callable[[], None], line: SupervisorLine) -> None:
    """Call `run`, send a failure to the supervisor's log, and exit this process."""
    try:
        run()
    except Exception as error:
        cause = error.__cause__ if isinstance(error, FalseStart) else None
        line.send(logging.WARNING, describe_failure(cause or error))
        sys.stderr.flush()
        # Not sys.exit(), which would wait for threads that environments have started.
        os._exit(1 if cause is None else NEVER_WORKED)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
