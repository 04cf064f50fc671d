"""What a supervised process may do: python -m tests.helpers.supervised CONFIG."""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from libtorchbeast.helper_process import SupervisorLine

logger = logging.getLogger("torchbeast")


def work(line, config):
    logger.info("at work")
    try:
        raise ValueError("out of tea")
    except ValueError:
        logger.warning("It failed.", exc_info=True)
    while True:
        line.tick()
        time.sleep(0.01)


def crash(line, config):
    ctypes.string_at(0)


def hang(line, config):
    logger.info("about to hang")
    hang_here()


def hang_here():
    time.sleep(1000)


def spawn(line, config):
    child = subprocess.Popen(["sleep", "1000"])
    logger.info("child %d", child.pid)
    time.sleep(1000)


def chat(line, config):
    print("from Python")
    print("from stderr", file=sys.stderr)
    ctypes.CDLL(None).puts(b"from C")
    subprocess.run(["echo", "from a child"], check=True)
    os.kill(os.getpid(), signal.SIGKILL)


def flood(line, config):
    for _ in range(8 * 1024):
        print("x" * 1023)
    print("the end", end="")


def report(line, config):
    for i in range(300):
        logger.warning("Problem %d: %s", i, "x" * 1023)
    logger.warning("the end")


def mark(line, config):
    Path(config["marker"]).write_text(json.dumps(os.getpid()))
    time.sleep(1000)


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    globals()[config["what"]](SupervisorLine(config["line"]), config)
