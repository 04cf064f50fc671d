"""A parent that dies while its child is busy: python -m tests.helpers.dying_parent KIND MARKER."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from libtorchbeast.helper_process import Helper
from torchbeast.runtime.monobeast_actors import ActorProcess, ParentPipe


def live_on(pipe: ParentPipe, marker: Path) -> None:
    marker.write_text(json.dumps(os.getpid()))
    time.sleep(1000)  # as in an environment that hangs


if __name__ == "__main__":
    kind, marker = sys.argv[1], Path(sys.argv[2])
    if kind == "helper":
        child = Helper("tests.helpers.supervised", {"what": "mark", "marker": str(marker)})
    else:
        context = multiprocessing.get_context("forkserver")
        child = ActorProcess(context, "actor", live_on, (marker,), heartbeat=lambda: 0)
    while not marker.exists() or not marker.read_text():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
