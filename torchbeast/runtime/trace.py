"""What all threads do for a few seconds, as a picture for chrome://tracing."""

import logging
import time
from pathlib import Path

import torch

logger = logging.getLogger("torchbeast")

RECORD_S = 3.0


class Trace:
    """Records from the first call of `record` on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: torch.profiler.profile | None = None
        self._ends_at: float | None = None

    def record(self) -> None:
        """Call it a few times a second; the same thread must start and stop a profile."""
        if self._ends_at is None:
            all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            self._profile = torch.profiler.profile(experimental_config=all_threads)
            self._profile.start()
            self._ends_at = time.monotonic() + RECORD_S
        elif time.monotonic() > self._ends_at:
            self.close()

    def close(self) -> None:
        """Write what there is."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            logger.info("A trace is in %s.", self._path)
