"""Learners in processes of their own, with the variables that torchrun would give them."""

import os
import sys
from contextlib import ExitStack, contextmanager

from tests.helpers.ports import free_port
from tests.helpers.training import TIMEOUT_S, Background, Training, command
from tests.helpers.warm_python import ROOT, WarmPopen


class RankOf(Training):
    """One of the learners of a run called `run`."""

    def __init__(self, rank, size, port, module, savedir, *args):
        self.folder = savedir / "run"
        args = ("--xpid", "run", "--log_interval_s", "0.2", *args)
        Background.__init__(
            self,
            command(module, savedir, *args),
            savedir / f"output-{rank}",
            popen=WarmPopen,
            cwd=ROOT,
            env={**os.environ, **variables(rank, size, port)},
        )


@contextmanager
def ranks_of(size, module, savedir, *args):
    """All of them, while they are at work; what is left of them then is killed."""
    port = free_port()
    with ExitStack() as stack:
        started = [RankOf(rank, size, port, module, savedir, *args) for rank in range(size)]
        for rank in started:
            stack.enter_context(rank)
        yield started


def run_ranks(size, folder, module, *args):
    """Until all have ended well; what they print is in <folder>/<rank>.txt."""
    port = free_port()
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            output = stack.enter_context((folder / f"{rank}.txt").open("w"))
            process = WarmPopen(
                [sys.executable, "-m", module, *args],
                stdout=output.fileno(),
                stderr=output.fileno(),
                cwd=ROOT,
                env={**os.environ, **variables(rank, size, port)},
            )
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait(TIMEOUT_S) for process in processes]
    texts = [(folder / f"{rank}.txt").read_text() for rank in range(size)]
    assert codes == [0] * size, "\n".join(texts)
    return texts


def variables(rank, size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
