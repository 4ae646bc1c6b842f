"""Mismatches between the collectives that ranks call: how they are found, and the errors, with a table."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.slots.deadlock import wait_text
from nbparallel.distributed.slots.fingerprint import BITS, COLUMNS
from nbparallel.distributed.slots.slot_area import CALL, CONTENT, LINE, TEXT, TEXT_OFFSET, WORD, SlotArea
from nbparallel.errors import CollectiveMismatchError
from nbparallel.wire.control import SLOT_HEADER, Operation, State

DIFFERENT = "ranks called different operations, or the same with different arguments"
Row = Sequence[str] | str
"""What one rank calls: the columns and a line number, or a sentence."""


class CallTable:
    """What every member of a group calls, as its slots say; read only when words differ.

    Parameters
    ----------
    area : SlotArea
        The group's slots.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        self._context, self._area = context, area

    def compare(self, generation: int, root: int | None) -> None:
        """Raise if the calls differ; with a `root`, other members may leave open what is moved."""
        contents = self._of_all(CONTENT, generation)
        if root is not None:
            contents.discard(0)
        if len(self._of_all(CALL, generation)) > 1 or len(contents) > 1:
            raise self.mismatch(DIFFERENT, generation, range(len(self._area.ranks)))

    def agree(self, generation: int) -> bool:
        """Whether all members pass the same dtype and shape; raises if they call different operations."""
        if len(self._of_all(CALL, generation)) > 1:
            raise self.mismatch(DIFFERENT, generation, range(len(self._area.ranks)))
        return len(self._of_all(CONTENT, generation)) == 1

    def differs(self, generation: int, arrived: Iterable[int]) -> bool:
        """Whether some of the members call different operations."""
        return len({self._word(CALL, i, generation) for i in arrived}) > 1

    def bits(self, generation: int) -> list[int]:
        """Return the low bits of every member's word."""
        words = self._area.words
        return [words[slots[generation] // 8 + WORD] & BITS for slots in self._area.slots]

    def _word(self, word: int, index: int, generation: int) -> int:
        return self._area.words[self._area.slots[index][generation] // 8 + word]

    def _of_all(self, word: int, generation: int) -> set[int]:
        words = self._area.words
        return {words[slots[generation] // 8 + word] for slots in self._area.slots}

    def row(self, index: int, generation: int) -> tuple[str, ...]:
        """Return the columns of a member's slot, and the line."""
        start = self._area.slots[index][generation] + TEXT_OFFSET
        length = min(self._word(TEXT, index, generation), SLOT_HEADER - TEXT_OFFSET)
        text = bytes(self._area.octets[start : start + length])
        return parse(text, self._word(LINE, index, generation))

    def rows(self, generation: int, arrived: Iterable[int], finished: Container[int] = ()) -> dict[int, Row]:
        """Return a row for every member.

        Parameters
        ----------
        arrived : iterable of int
            Group ranks of the members whose slots hold this collective.
        finished : container of int
            Ranks that are known to have finished the cell.
        """
        context, ranks = self._context, self._area.ranks
        rows: dict[int, Row] = {ranks[i]: self.row(i, generation) for i in arrived}
        for rank in ranks:
            if rank in rows:
                continue
            if rank in finished or context.gone(rank):
                rows[rank] = f"rank {rank} finished the cell"
                continue
            record = context.view.read_slot(rank)
            waiting = record.readable and record.state is State.WAITING
            rows[rank] = "waits " + wait_text(record, []) if waiting else "has not called it yet"
        return rows

    def mismatch(
        self, what: str, generation: int, arrived: Iterable[int], finished: Container[int] = ()
    ) -> CollectiveMismatchError:
        """Return the error that says what is wrong and what every member calls."""
        return CollectiveMismatchError(f"{what}:\n{table(self.rows(generation, arrived, finished))}")

    def not_called(
        self, operation: Operation, finished: Sequence[int], generation: int, arrived: Iterable[int]
    ) -> CollectiveMismatchError:
        """Return the error about ranks that finished the cell without a call that others wait for."""
        names = ", ".join(f"rank {r} finished the cell" for r in finished)
        what = f"{names} without calling {operation.name}, for which the others wait"
        return self.mismatch(what, generation, arrived, finished)


def left_inside(operation: Operation, rank: int) -> CollectiveMismatchError:
    """Return the error about a rank that finished the cell inside a collective."""
    return CollectiveMismatchError(f"rank {rank} ended the cell in the middle of {operation.name}")


def overlap(operation: Operation, one: int, other: int) -> ValueError:
    """Return the error about two ranks whose arguments share memory that the operation writes."""
    first, second = sorted((one, other))
    part = "" if operation is Operation.broadcast else "each rank's own part, `dist.shard(x)`, or "
    return ValueError(
        f"ranks {first} and {second} passed overlapping memory of one shared array to "
        f"{operation.name}, which would write it: pass {part}`x.copy()`"
    )


def table(rows: Mapping[int, Row]) -> str:
    """Return a text table of what each rank calls."""
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
