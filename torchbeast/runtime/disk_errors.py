"""Files that cannot be written for a while (a full disk): an error is logged, the run goes on."""

import logging
from types import TracebackType

logger = logging.getLogger("torchbeast")


class IgnoreWriteErrors:
    """Wrap each attempt to write something: an OSError is logged once, and suppressed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_failing = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        failed = isinstance(error, OSError)
        if failed and not self.is_failing:
            logger.error("Training goes on, but %s cannot be written: %s", self._what, error)
        if error is None and self.is_failing:
            logger.info("Writing %s works again.", self._what)
        if failed or error is None:
            self.is_failing = failed
        return failed
