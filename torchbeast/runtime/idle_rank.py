"""Lets a learner without a batch take part in the updates of the others."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchbeast.core.learner import Learner, NothingFinite, Publish
from torchbeast.core.rank_rounds import IDLE_ROUND_S
from torchbeast.runtime.threads import Threads, set_cpu_threads

JOIN_S = 60.0  # for an update in progress


@contextmanager
def attend_rounds(learner: Learner, publish: Publish) -> Iterator[None]:
    """While a learner thread is in here, another thread meets the other ranks whenever no batch
    has come for a while.

    What it raises sets `learner.finished`, and is raised again at the end.
    """
    if learner.ranks.size == 1:
        yield
        return
    ended = threading.Event()
    cpu_threads = torch.get_num_threads()  # of the learner thread that calls this

    def attend() -> None:
        # The same arithmetic as in learner threads: weights must stay the same on all ranks.
        set_cpu_threads(cpu_threads)
        torch.set_flush_denormal(True)
        while not ended.wait(IDLE_ROUND_S) and not learner.finished.is_set():
            if learner.rounds.idle_s < IDLE_ROUND_S:
                continue
            try:
                learner.update(None, (), publish)
            except NothingFinite:
                if not learner.rounds.any_clients:  # else it is the learner threads' business
                    raise

    threads = Threads("idle-rank", 1, attend, learner.finished)
    try:
        yield
    finally:
        ended.set()
        threads.join(JOIN_S)
