"""Nobody waits without a word: what takes long says so. Nothing here is compiled."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("torchbeast")

SAY_S, SAY_AGAIN_S = 10.0, 60.0  # until the first word, and the next one


@contextmanager
def say_if_slow(what: str) -> Iterator[None]:
    """Around something that a user waits for, before there is a view that could say so."""
    done = threading.Event()
    started_at = time.monotonic()

    def watch() -> None:
        pause_s = SAY_S
        while not done.wait(pause_s):
            # A warning is shown also where nobody has set up logging.
            logger.warning("%s takes long: %.0f s so far.", what, time.monotonic() - started_at)
            pause_s = SAY_AGAIN_S

    thread = threading.Thread(target=watch, name="say-if-slow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
