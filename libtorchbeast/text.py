"""Makes texts, above all those of other programs, fit to be shown and sent. Pure Python."""

import re
from collections.abc import Sequence

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Remove colour codes, and replace characters that would control a terminal by "?"."""
    return "".join(c if c.isprintable() else "?" for c in COLOURS.sub("", text))


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def encodable(text: str) -> str:
    """Replace lone surrogates, which file names may have and UTF-8 cannot encode, by "?"."""
    return text.encode(errors="replace").decode()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of text, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
