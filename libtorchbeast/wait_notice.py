"""Logs that something takes long, so that a user knows what the program waits for. Pure Python."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("torchbeast")

SAY_S, SAY_AGAIN_S = 10.0, 60.0  # until the first message, and between further ones


@contextmanager
def say_if_slow(what: str) -> Iterator[None]:
    """Log a warning, from time to time, while the `with` block runs for long.

    For what a user waits for before there is a live view.
    """
    done = threading.Event()
    started_at = time.monotonic()

    def watch() -> None:
        pause_s = SAY_S
        while not done.wait(pause_s):
            # A warning, because it is shown even if logging has not been set up.
            logger.warning("%s takes long: %.0f s so far.", what, time.monotonic() - started_at)
            pause_s = SAY_AGAIN_S

    thread = threading.Thread(target=watch, name="say-if-slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
