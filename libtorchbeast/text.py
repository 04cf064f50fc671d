"""Texts made fit to be shown and sent, above all those of others. Nothing here is compiled."""

import re
from collections.abc import Sequence

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Without colours, and without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in COLOURS.sub("", text))


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def encodable(text: str) -> str:
    """Without lone surrogates, which names of files may have and UTF-8 has no bytes for."""
    return text.encode(errors="replace").decode()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines, its columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
