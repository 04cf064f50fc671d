"""The same text again and again is one line with a count. For whoever logs what others say."""

import logging
import re
import time
from dataclasses import dataclass

REPEAT_S = 60.0  # the same text is let through once in so long
_NUMBER = re.compile(r"\d+(\.\d+)?")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass
class _Repeated:
    """A text that may come again."""

    at: float  # when its minute began
    num_shown: int  # in this minute
    num_folded: int = 0
    last: str = ""  # of those that were not shown
    level: int = logging.WARNING  # of logging


class RepeatFilter:
    """Lets a text through once a minute, or `times` times, and says then how often it came."""

    def __init__(self, most: int = 100, times: int = 1) -> None:
        """`most` different texts a minute; what is more is dropped."""
        self._most = most
        self._times = times
        self._seen: dict[str, _Repeated] = {}

    def take(
        self, text: str, who: str = "", key: str | None = None, level: int = logging.WARNING
    ) -> str | None:
        """The text, its last line if it was let through before, or None.

        `who` says it, and stands before it; texts with the same `key` (default: the text) are one.
        `level` is what `overdue` gives back.
        """
        now = time.monotonic()
        key = text if key is None else key
        seen = self._seen.get(key)
        if seen is not None and now - seen.at < REPEAT_S:
            if seen.num_shown < self._times:
                seen.num_shown += 1
                return who + text
            seen.num_folded += 1
            seen.last = who + _last_line(text)
            return None
        if seen is None and not self._has_place(now):
            return None
        self._seen[key] = _Repeated(now, num_shown=1, level=level)
        if seen is None or (self._times > 1 and not seen.num_folded):
            return who + text
        return f"{who}{_last_line(text)}{_again(seen.num_folded + 1)}"

    def overdue(self) -> list[tuple[int, str]]:
        """Levels and texts that came again and were not shown in the minute that is over."""
        now = time.monotonic()
        texts = []
        for seen in self._seen.values():
            if seen.num_folded and now - seen.at >= REPEAT_S:
                texts.append((seen.level, seen.last + _again(seen.num_folded)))
                seen.at, seen.num_shown, seen.num_folded = now, self._times, 0
        return texts

    def _has_place(self, now: float) -> bool:
        """For one more text."""
        if len(self._seen) >= self._most:
            recent = [(key, seen) for key, seen in self._seen.items() if now - seen.at < REPEAT_S]
            self._seen = dict(recent)
        return len(self._seen) < self._most


def _last_line(text: str) -> str:
    return text.rsplit("\n", 1)[-1]


def _again(number: int) -> str:
    return f" (again, {number} times since)"


def without_numbers(text: str) -> str:
    """A key for `RepeatFilter`: the same for all environments, steps and values.

    Lines between the first and the last are a traceback's, where numbers say which line it was.
    """
    lines = _ADDRESS.sub("#", text).split("\n")
    for i in {0, len(lines) - 1}:
        lines[i] = _NUMBER.sub("#", lines[i])
    return "\n".join(lines)
