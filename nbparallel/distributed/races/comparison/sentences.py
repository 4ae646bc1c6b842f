"""Sentences about races: ranks, lines, what was done there, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nbparallel.distributed.races.access_log import POSSIBLE, READ, WRITE, Site

Kinds = frozenset[int]
"""Of one rank's accesses, as the log has them."""
BOTH = READ | WRITE
_VERBS = {READ: ("read", "read"), WRITE: ("wrote", "written"), BOTH: ("read and wrote", "read and written")}

LOCK = '`with dist.lock("{name}"):` around it, or add up your own and `all_reduce`'
ONCE_OR_ADD = (
    "if it is to be done once, each rank its own part (`dist.local_slice`), or a second array; "
    'if all are to add to it, `with dist.lock("{name}"):` around it, or `all_reduce`'
)
LOCKS = '`with dist.lock("{name}"):` around each of the two'
BARRIER_OR_ONE_LOCK = (
    '`barrier()` between them if one is to come first, else `with dist.lock("{name}"):` around both together'
)
BARRIER_OR_LOCKS = f"`barrier()` between them if one is to come first, else {LOCKS}"
OWN_PART = "have each rank write its own part: `dist.local_slice`"
OWN_PART_OR_LOCK = OWN_PART + '; or `with dist.lock("{name}"):` around it'
BARRIER = "`barrier()` between them"
BARRIER_OR_OWN_PART = f"{BARRIER} if one is to come first, else {OWN_PART}"
READ_FIRST = "have all ranks read first, then `barrier()`, then write; or write into a second array"
A_COPY = "; if what it was passed to only reads, pass a copy"
ONE_RANK = "harmless, one rank is enough"


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks.

    >>> ranks_text([0]), ranks_text([0, 1]), ranks_text([0, 1, 2, 5])
    ('rank 0', 'ranks 0 and 1', 'ranks 0-2 and 5')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts: list[str] = []
    for span in spans:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if len(parts) == 1:
        return f"rank{'s' * ('-' in parts[0])} {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def line_text(site: Site) -> str:
    """Name a line, and its cell if it is another one."""
    line = f"line {site.line}" if site.line else "a line that is not known"
    return f"{line} of {site.label}" if site.label else line


def verb(kinds: Iterable[int]) -> str:
    """Return what accesses did."""
    surely = possibly = 0
    for kind in kinds:
        if kind & POSSIBLE:
            possibly |= kind & BOTH
        else:
            surely |= kind & BOTH
    possibly &= ~surely
    parts = [_VERBS[surely][0]] if surely else []
    parts += [f"may have {_VERBS[possibly][1]}"] if possibly else []
    return " and ".join(parts)


def door_text(site: Site, kinds: Iterable[int]) -> str:
    """Return through which function it may have happened."""
    if not site.door:
        return ""
    return f" (passed to `{site.door}`{', which may write' * any(kind & WRITE for kind in kinds)})"


def advice_for(
    array: str, indices: str, *done: int, same_line: bool, same_elements: bool, is_mutual: bool = False
) -> str:
    """Return what to do if two lines, or one on several ranks, read and write what they have in common.

    `is_mutual`: ranks have written what they have read, as where each takes the next number and counts on.
    """
    is_one = "[" in indices and ":" not in indices
    if is_mutual and is_one and not same_line and not all(kinds & WRITE for kinds in done):
        return BARRIER_OR_ONE_LOCK.format(name=array or "name")
    advice = _advice(*done, same_line=same_line, same_elements=same_elements, is_one=is_one)
    return advice.format(name=array or "name")


def _advice(first: int, second: int, *, same_line: bool, same_elements: bool, is_one: bool) -> str:
    if not same_line:
        if first == second == BOTH:
            return LOCKS if is_one else BARRIER_OR_LOCKS
        return BARRIER_OR_OWN_PART if first & second & WRITE else BARRIER
    if first == second == WRITE:
        return OWN_PART
    if first == second == BOTH:
        if not same_elements:
            return OWN_PART_OR_LOCK
        return LOCK if is_one else ONCE_OR_ADD
    return READ_FIRST


def joined(parts: Sequence[str]) -> str:
    """Return parts of a sentence as a list in words."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
