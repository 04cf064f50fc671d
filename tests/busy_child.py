"""A parent that dies while its child is busy: python -m tests.busy_child MARKER."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from torchbeast.core.processes import set_up_child


def live_on(marker: Path) -> None:
    set_up_child()
    marker.write_text(str(os.getpid()))
    time.sleep(1000)  # as in an environment that hangs


if __name__ == "__main__":
    marker = Path(sys.argv[1])
    child = multiprocessing.get_context("forkserver").Process(target=live_on, args=(marker,))
    child.start()
    while not marker.exists() or not marker.read_text():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
