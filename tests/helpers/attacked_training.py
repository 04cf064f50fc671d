"""A training run under attack, in a thread, with a client beside it that must not notice."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from libtorchbeast.groups import Group
from libtorchbeast.sync_envs import SyncEnvs
from tests.helpers.ports import free_port
from tests.helpers.remote import client
from tests.helpers.threads import run_in_threads, wait_until
from tests.helpers.training import newest_figures, read_connections
from torchbeast import polybeast_learner
from torchbeast.run import connections
from torchbeast.run.command_line import parse
from torchbeast.run.signals import StopRequest

WAIT_S = 100.0
SMALL = ("--model", "mlp", "--unroll_length", "4", "--batch_size", "2")


class Run:
    """A learner that trains as with this command line; attackers dial `address`.

    Its bystander dials `local`: who dials from there is another client to the learner.
    """

    def __init__(self, folder: Path, *args: str, address: str = "") -> None:
        self.folder = folder / "run"
        self.local = f"unix:{folder}/learner"
        self.address = address or f"127.0.0.1:{free_port()}"
        self.code: int | None = None
        (self.folder / connections.FILE).unlink(missing_ok=True)  # of a run before this one
        self._stop = StopRequest()
        where = ("--savedir", str(folder), "--xpid", "run", "--listen", self._listen)
        often = ("--log_interval_s", "0.1", "--total_steps", "100000000")
        self._flags = parse(polybeast_learner.Flags, [*where, *often, *SMALL, *args])

    @property
    def _listen(self) -> str:
        """One after the other: when the last can be seen, all can be dialled."""
        return f"{self.address},{self.local}"

    def train(self) -> None:
        self.code = polybeast_learner.train(self._flags, self._stop)

    def stop(self) -> None:
        """As SIGTERM does."""
        self._stop.signal = signal.SIGTERM

    def wait_for(self, condition: Any) -> None:
        wait_until(lambda: condition() or self.code is not None, WAIT_S)
        assert self.code is None, "the run is over"

    def wait_until_listening(self) -> None:
        self.wait_for(Path(self.local.removeprefix("unix:")).exists)

    @property
    def connections(self) -> list[dict[str, str]]:
        """A line for each client, as `torchbeast.status` shows it."""
        return read_connections(self.folder)

    @property
    def num_streams(self) -> int:
        return sum(int(line["streams"] or 0) for line in self.connections)

    def figure(self, name: str) -> float:
        """The newest of the logs; 0 before there is one."""
        if not (self.folder / "logs.csv").exists():
            return 0.0
        return float(newest_figures(self.folder).get(name) or 0.0)

    @contextlib.contextmanager
    def bystander(self) -> Iterator["TrainingBystander"]:
        """Plays CartPole; in the end nothing of it was lost, and there was one stream."""
        with client(self.local, make=cart_pole_group):
            bystander = TrainingBystander(self)
            bystander.plays_on()
            yield bystander
            bystander.plays_on()
            bystander.check()


class TrainingBystander:
    """The client beside an attack, as the learner sees it."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def figures(self) -> dict[str, str]:
        """Its line among those of all clients."""
        lines = self._run.connections
        return next((line for line in lines if line["address"].startswith("unix:")), {})

    @property
    def num_learnt(self) -> int:
        return int(self.figures.get("steps") or 0)

    def plays_on(self, num_steps: int = 20) -> None:
        """While this test is where it is: so many more of its steps are learnt from."""
        wanted = self.num_learnt + num_steps
        self._run.wait_for(lambda: self.num_learnt >= wanted)

    def check(self) -> None:
        figures = self.figures
        assert [figures[name] for name in ("streams", "refused", "lost")] == ["1", "0", "0"]


def cart_pole_group() -> Group:
    return Group(lambda _: SyncEnvs(lambda: gymnasium.make("CartPole-v1"), 1), seed=0)


@contextlib.contextmanager
def attacked_training(folder: Path, *args: str, address: str = "") -> Iterator[Run]:
    """Train until the end of the block, and then as SIGTERM asks for; nothing else may end it."""
    run = Run(folder, *args, address=address)
    with pytest.MonkeyPatch.context() as patch, run_in_threads(run.train):
        patch.setattr(connections, "WRITE_S", 0.1)
        try:
            run.wait_until_listening()
            yield run
            assert run.code is None, "the run is over"
        finally:
            run.stop()
    assert run.code == 0
