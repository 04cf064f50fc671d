"""Limits the rate of repeated log messages: repeats are logged as one line with a count."""

import logging
import re
import time
from dataclasses import dataclass

REPEAT_S = 60.0  # the same text is logged once in this time
_NUMBER = re.compile(r"\d+(\.\d+)?")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass
class _Repeated:
    """A text that was logged and may be repeated."""

    at: float  # when its current minute began
    num_shown: int  # in this minute
    num_folded: int = 0  # repeats in this minute that were not shown
    last: str = ""  # the last line of the newest of these
    level: int = logging.WARNING


class RepeatFilter:
    """Lets a text through `times` times a minute; after that minute reports how often it came."""

    def __init__(self, most: int = 100, times: int = 1) -> None:
        """At most `most` different texts a minute are let through; further ones are dropped."""
        self._most = most
        self._times = times
        self._seen: dict[str, _Repeated] = {}

    def take(
        self, text: str, who: str = "", key: str | None = None, level: int = logging.WARNING
    ) -> str | None:
        """Return what to log: the text, its last line and a count if it is a repeat, or None.

        `who` is put before the text. Texts with the same `key` (default: the text) count as the
        same text. `overdue` returns `level` with it.
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
        """Levels and texts of repeats that were held back, once their minute is over."""
        now = time.monotonic()
        texts = []
        for seen in self._seen.values():
            if seen.num_folded and now - seen.at >= REPEAT_S:
                texts.append((seen.level, seen.last + _again(seen.num_folded)))
                seen.at, seen.num_shown, seen.num_folded = now, self._times, 0
        return texts

    def _has_place(self, now: float) -> bool:
        """Whether there is a place for one more text; those older than a minute make room."""
        if len(self._seen) >= self._most:
            recent = [(key, seen) for key, seen in self._seen.items() if now - seen.at < REPEAT_S]
            self._seen = dict(recent)
        return len(self._seen) < self._most


def _last_line(text: str) -> str:
    return text.rsplit("\n", 1)[-1]


def _again(number: int) -> str:
    return f" (again, {number} times since)"


def without_numbers(text: str) -> str:
    """A key for `RepeatFilter` that is the same for all environments, steps and values.

    Numbers stay in the lines between the first and the last: those are a traceback's, and the
    numbers are line numbers.
    """
    lines = _ADDRESS.sub("#", text).split("\n")
    for i in {0, len(lines) - 1}:
        lines[i] = _NUMBER.sub("#", lines[i])
    return "\n".join(lines)
