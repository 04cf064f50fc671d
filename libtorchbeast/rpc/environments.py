"""A process with environments for a learner elsewhere: it listens, or it dials in.

Started by `torchbeast.polybeast_env` as `python -m libtorchbeast.rpc.environments CONFIG`. It
imports no torch.
"""

import contextlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from libtorchbeast.environments import Environments, Row, make_environments
from libtorchbeast.rpc.client import EnvironmentClient
from libtorchbeast.rpc.messages import Refused
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.server import EnvironmentServer
from libtorchbeast.worker import exit_if_orphaned, set_up_process

CANNOT_WORK = 3  # exit code: somebody has to mend something before another start makes sense
LOOK_AROUND_S = 1.0
STOP_S = 2.0  # for environments to end


@dataclass(frozen=True)
class EnvironmentsConfig:
    """All that the process needs to know; goes to it as JSON."""

    factory: str
    """`package.module:function`, called with num_envs, seed and `factory_options`."""
    factory_options: dict[str, Any]
    num_envs: int
    num_streams: int
    """Each with `num_envs` environments."""
    seed: int
    env_timeout_s: float
    """The process ends itself when making, resetting or stepping environments takes longer."""
    address: str
    dial: bool
    """Whether to dial the address, or to listen there."""
    name: str
    security: dict[str, Any]
    parent: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EnvironmentsConfig":
        return cls(**json.loads(text))


class Watch:
    """Knows what environments are busy with, and since when."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[float, str]] = {}  # of each thread

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        self._since[threading.get_ident()] = (time.monotonic(), what)
        try:
            yield
        finally:
            del self._since[threading.get_ident()]

    def exit_if_busy_for(self, seconds: float) -> None:
        """Nobody can end a thread; whoever started the process starts it anew."""
        for since, what in list(self._since.values()):
            if time.monotonic() - since > seconds:
                print(f"error: {what} took more than {seconds:g} s (--env_timeout_s).",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(1)


class WatchedEnvironments:
    """Environments whose every call is watched."""

    def __init__(self, environments: Environments, watch: Watch) -> None:
        self._environments = environments
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environments, name)

    def reset(self) -> Row:
        with self._watch.busy("A reset"):
            return self._environments.reset()

    def step(self, actions: Any) -> Row:
        with self._watch.busy("A step"):
            return self._environments.step(actions)

    def close(self) -> None:
        with self._watch.busy("Closing the environments"):
            self._environments.close()


def run(config: EnvironmentsConfig) -> None:
    """Until SIGTERM."""
    seeds = itertools.count(config.seed, config.num_envs)
    watch = Watch()

    def make(knows_truncation: bool = True) -> Any:
        with watch.busy("Making the environments"):
            environments = make_environments(
                config.factory, config.num_envs, next(seeds) % 2**31, **config.factory_options
            )
        return WatchedEnvironments(environments, watch)

    security = Security.from_json(config.security)
    players: list[EnvironmentClient | EnvironmentServer]
    if config.dial:
        players = [
            EnvironmentClient(make, config.address, config.name, security)
            for _ in range(config.num_streams)
        ]
    else:
        players = [
            EnvironmentServer(
                make,
                config.address,
                config.name,
                security,
                num_streams=config.num_streams,
            )
        ]

    def stop(*_: Any) -> None:
        for player in players:
            player.stop()

    signal.signal(signal.SIGTERM, stop)
    ended = threading.Event()

    def look_around() -> None:
        while not ended.wait(LOOK_AROUND_S):
            exit_if_orphaned(config.parent)
            watch.exit_if_busy_for(config.env_timeout_s)

    watcher = threading.Thread(target=look_around, name="watcher", daemon=True)
    watcher.start()
    executor = ThreadPoolExecutor(len(players), thread_name_prefix="player")
    try:
        runs = [executor.submit(player.run) for player in players]
        ended_runs, _ = wait(runs, return_when=FIRST_COMPLETED)
        stop()
        for ended_run in ended_runs:
            ended_run.result()  # raises what ended it
        wait(runs, STOP_S)
    finally:
        ended.set()
        watcher.join(2 * LOOK_AROUND_S)


def main(text: str) -> int:
    config = EnvironmentsConfig.from_json(text)
    set_up_process(config.parent)
    logging.basicConfig(level=logging.INFO, format=f"[{config.name}] %(message)s")
    try:
        run(config)
    except Exception as error:
        if isinstance(error, Refused) or (
            isinstance(error, (OSError, ValueError)) and not config.dial
        ):
            print(f"error: {error}", file=sys.stderr)
            return CANNOT_WORK
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # without waiting for environments that hang in other threads
