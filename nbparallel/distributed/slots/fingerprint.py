"""Fingerprint of a collective call: one word to compare between ranks, and a text for error messages.

Every collective writes both into the rank's slot before it counts up the arrival word.  Equal words mean
equal calls; the text is read only when they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.wire.control import SLOT_TEXT

SHARED, DIRECT, READABLE = 1, 2, 4
"""Low bits of the word: the array lies in shared memory; other ranks can work on it in place; or it is
private, and others can read it in place."""
BITS = SHARED | DIRECT | READABLE
COLUMNS = ("operation", "dtype", "shape", "root", "operator")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One call."""

    word: int
    """Equal for calls that match (61 bits: a difference is missed once in 2**60)."""
    call: int
    """The same without the content."""
    content: int
    """Only dtype and shape of what is moved; 0: left open, "whatever the root has"."""
    text: bytes
    """The columns of the table in an error message, separated by tabs, cut to fit a slot."""


def _word(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") | 8) & ~BITS


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


# Offers: by the low bits of all members' words they decide alike which way the bytes of a large collective
# take: between the arrays themselves, which all lie in shared memory; out of the arrays themselves, which
# are all private, and which others read; else through the slots, or between copies in shared memory.


def all_offer(bits: Sequence[int], way: int) -> bool:
    """Return whether all members offer a way: `DIRECT` or `READABLE`."""
    return all(offer & way for offer in bits)


def offers_differ(bits: Sequence[int]) -> bool:
    """Return whether members offer different ways: some slots then hold what is not used."""
    ways = {offer & (DIRECT | READABLE) for offer in bits}
    return len(ways) > 1
