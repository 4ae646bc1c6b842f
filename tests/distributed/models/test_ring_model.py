"""Rings of messages (`packing`), explored in every interleaving: no byte is read but those of the record."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.distributed.models.exploration import (
    ORDERS,
    Exploration,
    Program,
    WrongError,
    announce,
    fence,
    load,
    read,
    store,
    until,
)


@dataclass(frozen=True)
class Ring:
    """Records by their length, in a ring of so many units; and what is done wrong on purpose."""

    records: tuple[int, ...]
    capacity: int = 3
    weak: bool = False
    wrong: str = ""

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        words = dict.fromkeys(["tail", "head", *(f"unit{i}" for i in range(self.capacity))], 0)
        return Exploration([lambda: put_all(self), lambda: take_all(self)], words, order).run()


def put_all(r: Ring) -> Program:
    """Write all records, each as soon as there is room; unit p holds p + 1."""
    position, room = 0, r.capacity + (r.wrong == "one unit too many")
    for i in range(len(r.records)):
        end = position + r.records[i]
        head = yield load("head")
        if end - head > room:
            yield until(("head", end - room))
        del head
        if r.wrong == "announce before writing":
            yield from announce(r, "tail", end)
        for unit in range(position, end):
            yield store(f"unit{unit % r.capacity}", unit + 1)
        yield from announce(r, "tail", end)
        position = end


def take_all(r: Ring) -> Program:
    """Take all records out, each as soon as it is there."""
    position = 0
    for i in range(len(r.records)):
        end = position + r.records[i]
        yield until(("tail", end))
        if r.weak and r.wrong != "no fence after tail":
            yield fence()
        if r.wrong == "free before reading":
            yield from announce(r, "head", end)
        for unit in range(position, end):
            yield read(f"unit{unit % r.capacity}", unit + 1)
        yield from announce(r, "head", end)
        position = end


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("records", [(1, 1, 1, 1, 1), (2, 1, 2, 2), (3, 1, 3)])
def test_every_record_is_read_as_it_was_written(order: str, records: tuple[int, ...]) -> None:
    """Also those that wrap around the ring's end, and those that fill it."""
    assert Ring(records, weak=order == "weak").explore(order) > 30


@pytest.mark.parametrize(
    ("wrong", "order"),
    [
        ("one unit too many", "sc"),
        ("announce before writing", "sc"),
        ("free before reading", "sc"),
        ("no fence before tail", "weak"),
        ("no fence after tail", "weak"),
        ("no fence before head", "weak"),
    ],
)
def test_the_model_sees_what_is_done_wrong(wrong: str, order: str) -> None:
    """Each step that is left out or done too early is found."""
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        Ring((2, 2, 2), weak=order == "weak", wrong=wrong).explore(order)
