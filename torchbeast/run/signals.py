"""Ctrl-C and SIGTERM as a request to stop, which the main loop checks a few times a second."""

import signal
import threading
import time
from types import FrameType

# One request may come as several signals: a terminal or `timeout` signals the whole group, and
# `make` passes its own on.
SAME_REQUEST_S = 1.0


class StopRequest:
    """While entered, SIGINT and SIGTERM are only noted; a second, later Ctrl-C interrupts."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._first_at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set signal handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as shells expect; 0 after SIGTERM, which asks for a tidy end."""
        return 130 if self.signal == signal.SIGINT else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_at = number, now
        elif number == signal.SIGINT and now - self._first_at > SAME_REQUEST_S:
            raise KeyboardInterrupt
