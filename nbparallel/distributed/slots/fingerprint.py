"""Fingerprints: what a rank says it is calling, as one word to compare and as a line for people.

Every collective leaves both in the rank's slot before it announces that it has arrived.  Equal words mean
equal calls; the text is read only when they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.wire.control import SLOT_TEXT

SHARED, DIRECT = 1, 2
"""Low bits of the word: the array lies in shared memory; others can work on it in place."""
BITS = SHARED | DIRECT
COLUMNS = ("operation", "dtype", "shape", "root", "operator")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One call."""

    word: int
    """Equal for calls that belong together (62 bits: a difference goes unnoticed once in 2**62)."""
    call: int
    """The same without what is moved."""
    content: int
    """Only what is moved; 0: left open, "whatever the root has"."""
    text: bytes
    """The columns of the table, tab separated, cut to fit a slot."""


def _word(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") | 4) & ~BITS


def fingerprint(
    operation: str,
    dtype: str = "-",
    shape: str = "-",
    *,
    root: int | None = None,
    operator: str = "-",
    content: Any = None,
) -> Fingerprint:
    """Return the fingerprint of a call.

    Parameters
    ----------
    content : object, optional
        What is moved, by its `repr`; None: left open.
    """
    root_text = "-" if root is None else str(root)
    text = "\t".join((operation, dtype, shape, root_text, operator)).encode("utf-8", "backslashreplace")
    return Fingerprint(
        _word(operation, root_text, operator, content),
        _word(operation, root_text, operator),
        0 if content is None else _word(content),
        text[:SLOT_TEXT],
    )


def table(rows: Mapping[int, Sequence[str] | str]) -> str:
    """Lay out what each rank calls: columns and a line number, or one sentence for a rank."""
    head = ("rank", *COLUMNS, "line")
    cells = [(str(r), *row) for r, row in sorted(rows.items()) if not isinstance(row, str)]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = {int(line[0]): _justify(line, widths) for line in cells}
    lines |= {r: f"{r!s:<{widths[0]}}  {row}" for r, row in rows.items() if isinstance(row, str)}
    return "\n".join(["  " + _justify(head, widths), *("  " + lines[r] for r in sorted(lines))])


def _justify(values: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip()


def parse(text: bytes, line: int) -> tuple[str, ...]:
    """Return the columns of a slot's text, and the line."""
    columns = text.decode("utf-8", "replace").split("\t")
    columns += ["?"] * (len(COLUMNS) - len(columns))
    return (*columns[: len(COLUMNS)], str(line) if line else "?")
