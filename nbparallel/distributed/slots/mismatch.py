"""Mismatches between the collectives that ranks call: how they are found, and the errors, with a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.deadlock import wait_text
from nbparallel.distributed.slots.slot_area import (
    BITS,
    CALL,
    COLUMNS,
    CONTENT,
    LINE,
    TEXT,
    TEXT_OFFSET,
    WORD,
    SlotArea,
)
from nbparallel.errors import LEFT_OUT, CollectiveMismatchError, rank_list
from nbparallel.wire.control import SLOT_HEADER, Operation, State

DIFFERENT = "ranks called different operations, or the same with different arguments"
Row = Sequence[str]
"""What one rank calls: the columns, a line, and perhaps the number of its calls."""
SETTLE_NS = 100_000_000
"""How long an error waits for ranks that are on their way to what its table says of them."""
_OUTSIDE = (Operation.recv, Operation.send, Operation.lock, Operation.new_group)
"""Waits for something else than the arrival of a group."""
_HEAD = ("rank", *COLUMNS, "line", "calls")


class CallTable:
    """What every member of a group calls, as its slots say; read only when words differ.

    Attributes
    ----------
    area : SlotArea
        The group's slots.
    number, generation : int
        The last collective that began, and the index of its slots.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        self._context, self.area = context, area
        self.number = self.generation = self._former = 0

    def begin_cell(self) -> None:
        """Count calls from here."""
        self._former = self.number

    def compare(self, *, root: int | None = None) -> None:
        """Raise on every rank if the calls differ, to be called when words do.

        With a `root`, other members may leave open what is moved.
        """
        contents = self._of_all(CONTENT)
        if root is not None:
            contents.discard(0)
        same_call = len(self._of_all(CALL)) == 1
        if not same_call or len(contents) > 1:
            what = DIFFERENT if root is None or not same_call else self._unlike_the_source(root)
            raise self.mismatch(what)

    def _unlike_the_source(self, root: int) -> str:
        """Return which member passed an array that cannot take the root's value."""
        ranks, source = self.area.ranks, self._word(CONTENT, root)
        other = next(
            rank for index, rank in enumerate(ranks) if self._word(CONTENT, index) not in (0, source)
        )
        return (
            f"rank {ranks[root]} is the source, and what it passed does not fit the array that rank {other} "
            f"passed to be filled; other ranks than the source pass None or such an array, and "
            f"src={other} on all ranks makes rank {other} the source"
        )

    def agree(self) -> bool:
        """Whether all members pass the same dtype and shape; raises if they call different operations."""
        if len(self._of_all(CALL)) > 1:
            raise self.mismatch(DIFFERENT)
        return len(self._of_all(CONTENT)) == 1

    def differs(self, arrived: Iterable[int]) -> bool:
        """Whether some of the members call different operations."""
        return len({self._word(CALL, i) for i in arrived}) > 1

    def bits(self) -> list[int]:
        """Return the low bits of every member's word."""
        words, generation = self.area.words, self.generation
        return [words[slots[generation] // 8 + WORD] & BITS for slots in self.area.slots]

    def _word(self, word: int, index: int) -> int:
        return self.area.words[self.area.slots[index][self.generation] // 8 + word]

    def _of_all(self, word: int) -> set[int]:
        return {self._word(word, index) for index in range(len(self.area.slots))}

    def row(self, index: int) -> tuple[str, ...]:
        """Return the columns of a member's slot, and the line."""
        start = self.area.slots[index][self.generation] + TEXT_OFFSET
        length = min(self._word(TEXT, index), SLOT_HEADER - TEXT_OFFSET)
        text = bytes(self.area.octets[start : start + length])
        return parse(text, self._context.call_site.name(self._word(LINE, index)))

    def rows(self, arrived: Iterable[int], finished: Container[int] = ()) -> dict[int, Row]:
        """Return a row for every member.

        Parameters
        ----------
        arrived : iterable of int
            Group ranks of the members whose slots hold it.
        finished : container of int
            Ranks that are known to have finished the cell.
        """
        area, here = self.area, set(arrived)
        rows: dict[int, Row] = {}
        for index, rank in enumerate(area.ranks):
            if index in here:
                rows[rank] = *self.row(index), str(self.number - self._former)
            else:
                what, line = self._doing(rank, finished)
                calls = max(0, area.words[area.done[index]] - self._former)
                rows[rank] = what, *("-" * (len(COLUMNS) - 1)), line or "-", str(calls)
        return rows

    def _doing(self, rank: int, finished: Container[int]) -> tuple[str, str]:
        """Return what a member does instead, and on which line."""
        if rank in finished or self._context.gone(rank):
            return "finished the cell", ""
        record = self._context.view.read_slot(rank)
        if not record.readable or record.state is not State.WAITING:
            return "has not called it yet", ""
        return f"waits {wait_text(record, [], '')}", self._context.call_site.name(record.line)

    def mismatch(
        self, what: str, arrived: Iterable[int] | None = None, finished: Container[int] = ()
    ) -> CollectiveMismatchError:
        """Return the error that says what is wrong and what every member calls; by default all `arrived`."""
        here = range(len(self.area.ranks)) if arrived is None else arrived
        return CollectiveMismatchError(f"{what}:\n{table(self.rows(here, finished))}")

    def not_called(
        self, operation: Operation, finished: Sequence[int], arrived: Callable[[], Sequence[int]]
    ) -> CollectiveMismatchError:
        """Return the error about ranks that finished the cell without a call that others wait for.

        It waits a moment for the members that have just begun the cell, or are about to end it: else the
        table would differ from rank to rank, and from run to run.
        """
        limit = time.monotonic_ns() + SETTLE_NS
        while not self._settled(here := arrived()) and time.monotonic_ns() < limit:
            time.sleep(0.001)
        absent = [rank for index, rank in enumerate(self.area.ranks) if index not in here]
        finished = [rank for rank in absent if rank in finished or self._context.gone(rank)]
        names = f"{rank_list(finished)} {LEFT_OUT} {operation.name}"
        return self.mismatch(f"{names}, for which the others wait", here, finished)

    def _settled(self, arrived: Container[int]) -> bool:
        """Whether every member has arrived, has left the cell, or waits for something else."""
        context, area = self._context, self.area
        for index, rank in enumerate(area.ranks):
            if index in arrived or context.gone(rank) or context.peers.has_failed(rank):
                continue
            record = context.view.read_slot(rank)
            if not record.readable or record.state is not State.WAITING:
                return False
            here = record.area == area.packed and record.operation not in _OUTSIDE
            if here and not area.missing(record.target):
                return False  # all have arrived where it waits, and it goes on when it gets a CPU
        return True


def left_inside(operation: Operation, rank: int) -> CollectiveMismatchError:
    """Return the error about a rank that finished the cell inside a collective."""
    return CollectiveMismatchError(f"rank {rank} ended the cell in the middle of {operation.name}")


def overlap(operation: Operation, one: int, other: int) -> ValueError:
    """Return the error about two ranks whose arguments share memory that the operation writes."""
    first, second = sorted((one, other))
    whole = operation in (Operation.broadcast, Operation.average_gradients)
    part = "" if whole else "each rank's own part, `dist.shard(x)`, or "
    copies = "`x.copy()`" + (", of a tensor `x.clone()`" if "torch" in sys.modules else "")
    return ValueError(
        f"ranks {first} and {second} passed overlapping memory of one shared array to "
        f"{operation.name}, which would write it: pass {part}{copies}"
    )


def table(rows: Mapping[int, Row]) -> str:
    """Return a table of what each rank calls, without columns that no rank fills; all rows are as long."""
    calls = [(rank_list([rank]).removeprefix("rank "), *row) for rank, row in sorted(rows.items())]
    columns = zip(_HEAD, *calls, strict=False)  # rows may lack the last column of the head
    lines = list(zip(*(column for column in columns if {*column[1:]} != {"-"}), strict=True))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  " + _justify(line, widths) for line in lines)


def _justify(values: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip()


def parse(text: bytes, line: str) -> tuple[str, ...]:
    """Return the columns of a slot's text, and the line."""
    columns = text.decode("utf-8", "replace").split("\t")
    columns += ["?"] * (len(COLUMNS) - len(columns))
    return (*columns[: len(COLUMNS)], line or "?")
