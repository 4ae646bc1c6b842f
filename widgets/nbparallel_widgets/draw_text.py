"""What ranks hold, in words: where numbers come from, a table, and sentences for screen readers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from nbparallel.errors import rank_list
from nbparallel.errors.text.table import Table
from nbparallel.session.results import DrawnValues
from nbparallel.transfer.variable_info import MOST_NUMBERS
from nbparallel.wire.inspection import Number, ShownBlock, ShownValue

SEVERAL, NEW = -1, -2
"""Origins of a number that are no rank."""
NOT_DEFINED = "not defined"
_LONGEST = 9
"""Digits of a whole number that is written out."""


def number_text(number: Number) -> str:
    """Return a number as short as a picture needs it.

    >>> [number_text(n) for n in (12.5, 1e6, True, 7, 123456789012, 1 / 3, float("nan"), 1 + 2j)]
    ['12.5', '1e+06', 'True', '7', '1.235e+11', '0.3333', 'nan', '1+2j']
    """
    if isinstance(number, bool | str):
        return str(number)
    if isinstance(number, complex):
        return f"{number:.3g}"
    if isinstance(number, int) and abs(number) < 10**_LONGEST:
        return str(number)
    return f"{number:.4g}"


class NumberOrigins:
    """Which rank had a number before the cell; where only the values of now are drawn: which has it.

    Parameters
    ----------
    index : int
        The place of the name among `DrawnValues.names`.

    Attributes
    ----------
    complete : bool
        Whether all numbers are known: of long arrays only the first are.
    """

    def __init__(self, drawn: DrawnValues, index: int) -> None:
        self._ranks: dict[tuple[bool, Number], int] = {}
        self._is_now = is_now(drawn)
        self.complete = True
        looks: dict[tuple[int, int, int], ShownValue] = {}
        for rank, report in sorted(drawn.ranks.items(), key=lambda item: item[1].before_ns):
            # a cell moves numbers from one name to another; now each name is by itself
            sources = report.after[index : index + 1] if self._is_now else report.before
            for value in report.after[:1] if made_here(drawn) else sources:
                if value is None:
                    continue
                if value.segment:  # to later looks at this memory, other ranks may have written already
                    value = looks.setdefault((value.segment, value.start, value.stop), value)
                self.complete = self.complete and value.complete
                for number in value.numbers:
                    key = _key(number)
                    self._ranks[key] = rank if self._ranks.get(key, rank) == rank else SEVERAL

    def of(self, number: Number, *, before: bool = False) -> int:
        """Return the only rank that had a number, `SEVERAL` or `NEW`; in doubt `SEVERAL`."""
        if isinstance(number, float) and math.isnan(number):
            return SEVERAL if before or self._is_now else NEW  # it equals nothing
        known = before or self._is_now or not self.complete
        return self._ranks.get(_key(number), SEVERAL if known else NEW)


def _key(number: Number) -> tuple[bool, Number]:
    return isinstance(number, bool), number


def is_now(drawn: DrawnValues) -> bool:
    """Whether values of now are drawn, not those of a cell before and after it."""
    return not any(report.before for report in drawn.ranks.values())


def made_here(drawn: DrawnValues) -> bool:
    """Whether the cell made all of several names: then numbers come from the first one, as it left it."""
    values = [value for report in drawn.ranks.values() for value in report.before]
    return len(drawn.names) > 1 and not is_now(drawn) and not any(values)


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row of a picture: what a name holds on a rank, or on all of them if that is the same memory."""

    rank: int
    """-1: all ranks."""
    before: tuple[ShownBlock, ...] | None
    """None: the name was not defined."""
    after: tuple[ShownBlock, ...] | None
    """Likewise."""
    left_out: tuple[int, int] = (0, 0)
    """Elements of a list that are not among these, before and after."""
    died: str = ""
    """How the rank ended, which could not report."""


def rows(drawn: DrawnValues, index: int) -> list[DrawnRow]:
    """Return the rows of a name, by its place among `DrawnValues.names`."""
    before = {rank: report.before[index] for rank, report in drawn.ranks.items() if report.before}
    after = {rank: report.after[index] for rank, report in drawn.ranks.items()}
    died = [DrawnRow(rank, None, None, died=how) for rank, how in drawn.died.items()]
    # ranks looked at different times: the first one saw what was there before, the last one the end
    by_time = sorted(drawn.ranks, key=lambda rank: drawn.ranks[rank].before_ns)
    first = _one_array(before, by_time[:1])
    last = _one_array(after, sorted(drawn.ranks, key=lambda rank: drawn.ranks[rank].after_ns)[-1:])
    if last and (first or not any(before.values())):
        return [DrawnRow(-1, first or None, last), *died]
    found = [DrawnRow(rank, *_pair(before.get(rank), after[rank])) for rank in after]
    return sorted([*found, *died], key=attrgetter("rank"))


def _pair(before: ShownValue | None, after: ShownValue | None) -> tuple[
    tuple[ShownBlock, ...] | None, tuple[ShownBlock, ...] | None, tuple[int, int]
]:  # fmt: skip
    return (
        None if before is None else before.blocks,
        None if after is None else after.blocks,
        (before.left_out if before else 0, after.left_out if after else 0),
    )


def _one_array(values: Mapping[int, ShownValue | None], chosen: Sequence[int]) -> tuple[ShownBlock, ...]:
    """Return the parts of the array that is the same memory on all ranks, as one saw it; else nothing."""
    places = {(value.segment, value.start, value.stop) if value else (0, 0, 0) for value in values.values()}
    if len(values) < 2 or len(places) != 1:
        return ()
    value = values[chosen[0]]
    return value.parts if value is not None else ()


def title(drawn: DrawnValues) -> str:
    """Return what is drawn: ``x, y on ranks 0-3 before and after In[3]``."""
    where = rank_list(sorted({*drawn.ranks, *drawn.died})) if drawn.ranks or drawn.died else "no rank"
    cell = f"In[{drawn.number}]" if drawn.number else "the cell"
    when = "now" if is_now(drawn) else f"before and after {cell}"
    return f"{', '.join(drawn.names)} on {where} {when}"


def table(drawn: DrawnValues) -> Table:
    """Return everything as a table."""
    now, found = is_now(drawn), []
    for index, name in enumerate(drawn.names):
        origins = NumberOrigins(drawn, index)
        for row in rows(drawn, index):
            who = "all (shared)" if row.rank < 0 else f"rank {row.rank}"
            if row.died:
                found.append((name, who, "", row.died, ""))
                continue
            before = "" if now else value_text(row.before, row.left_out[0])
            after = value_text(row.after, row.left_out[1])
            found.append((name, who, before, after, sources(row, origins, now)))
    head = ("name", "where", "before", "now" if now else "after", "only on" if now else "numbers from")
    return Table(title(drawn), head, found, foot(drawn), widest=1000).without_empty_columns()


def foot(drawn: DrawnValues) -> str:
    """Return what has to be said about where numbers come from."""
    complete = all(NumberOrigins(drawn, index).complete for index in range(len(drawn.names)))
    cut = f"of a long array the first {MOST_NUMBERS:,} numbers were compared"
    first = f"made in this cell: a number is in the colour of the rank that has it in {drawn.names[0]}"
    return "\n".join([cut] * (not complete) + [first] * made_here(drawn))


def sources(row: DrawnRow, origins: NumberOrigins, now: bool) -> str:
    """Return where the numbers of a row come from: ``ranks 0-3``, ``new`` …; where none are, nothing."""
    if not now and row.before == row.after:
        return "unchanged" if row.after else ""
    found = {origins.of(number, before=now) for block in row.after or () for r in block.rows for number in r}
    ranks = sorted(found - {SEVERAL, NEW})
    words = [rank_list(ranks)] if ranks else []
    words += ["several ranks"] * (SEVERAL in found) + ["new"] * (NEW in found)
    return ", ".join(words)


def value_text(blocks: Sequence[ShownBlock] | None, left_out: int = 0) -> str:
    """Return a value in letters; rows of an array are lines."""
    if blocks is None:
        return NOT_DEFINED
    texts = [_block_text(block) for block in blocks]
    texts += [f"… {left_out:,} more"] if left_out else []
    return ("\n" if any("\n" in text for text in texts) else " | ").join(texts)


def _block_text(block: ShownBlock) -> str:
    if text := word_of(block):
        return text
    lines = [" ".join(map(number_text, row)) for row in block.rows]
    if more := left_out_of(block, block.rows):
        lines[-1] += f" … {more:,} more"
    return ("" if block.rank < 0 else f"rank {block.rank}: ") + "\n".join(lines)


def word_of(block: ShownBlock) -> str:
    """Return what stands for a block without numbers; empty if it has some."""
    return block.word or (f"empty ({block.form})" if not block.count else "")


def left_out_of(block: ShownBlock, shown: Sequence[Sequence[Number]]) -> int:
    """Return how many numbers of a block are not shown."""
    return block.count - sum(map(len, shown))


def sentences(drawn: DrawnValues) -> Iterator[str]:
    """Yield what the picture shows, a sentence a row."""
    now = is_now(drawn)
    for index, name in enumerate(drawn.names):
        origins = NumberOrigins(drawn, index)
        for row in rows(drawn, index):
            who = "shared by all ranks" if row.rank < 0 else f"on rank {row.rank}"
            after = row.died or value_text(row.after, row.left_out[1]).replace("\n", "; ")
            if now or row.died:
                yield f"{name} {who}: {after}."
                continue
            source = sources(row, origins, now)
            before = value_text(row.before, row.left_out[0]).replace("\n", "; ")
            note = f" ({source if source in ('new', 'unchanged') else f'from {source}'})" if source else ""
            yield f"{name} {who}: before {before}, after {after}{note}."
