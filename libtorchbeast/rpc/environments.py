"""A process with environments for a learner elsewhere: it listens, or it dials in.

Started by `torchbeast.polybeast_env` as `python -m libtorchbeast.rpc.environments CONFIG`. It
imports no torch.
"""

import importlib
import itertools
import json
import logging
import os
import signal
import sys
import threading
import traceback
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any

from libtorchbeast.rpc.client import EnvironmentClient
from libtorchbeast.rpc.messages import Refused
from libtorchbeast.rpc.security import Security
from libtorchbeast.rpc.server import EnvironmentServer
from libtorchbeast.rpc.single import Environments
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


def run(config: EnvironmentsConfig) -> None:
    """Until SIGTERM."""
    module, _, name = config.factory.partition(":")
    factory = getattr(importlib.import_module(module), name)
    seeds = itertools.count(config.seed, config.num_envs)

    def make_environments(knows_truncation: bool = True) -> Environments:
        return factory(num_envs=config.num_envs, seed=next(seeds) % 2**31, **config.factory_options)

    security = Security.from_json(config.security)
    players: list[EnvironmentClient | EnvironmentServer]
    if config.dial:
        players = [
            EnvironmentClient(make_environments, config.address, config.name, security)
            for _ in range(config.num_streams)
        ]
    else:
        players = [
            EnvironmentServer(
                make_environments,
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

    def watch_parent() -> None:
        while not ended.wait(LOOK_AROUND_S):
            exit_if_orphaned(config.parent)

    watcher = threading.Thread(target=watch_parent, name="parent", daemon=True)
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
