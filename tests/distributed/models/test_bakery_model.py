"""Locks (`lock_table`), explored in every interleaving: never two holders, whatever order memory has.

What a lock protects is a word that is 0 whenever no rank is inside.
"""

from __future__ import annotations

import pytest

from tests.distributed.models.exploration import (
    ORDERS,
    Exploration,
    Program,
    WrongError,
    fence,
    load,
    read,
    store,
)

DRAWING = 1


def take(me: int, count: int, weak: bool, wrong: str = "") -> Program:
    """Take a lock: `LockTable._wait_for_turn`."""
    others = tuple(r for r in range(count) if r != me)
    if wrong != "draw unseen":
        yield store(f"ticket{me}", DRAWING)
    if wrong != "no fence before drawing":
        yield fence()
    largest = DRAWING
    for i in range(len(others)):
        ticket = yield load(f"ticket{others[i]}")
        largest = max(largest, ticket)
    mine = largest + 1
    ticket = 0
    if weak:
        yield fence()
    yield store(f"ticket{me}", mine)
    if wrong != "no fence after drawing":
        yield fence()
    for i in range(len(others)):
        while True:
            ticket = yield load(f"ticket{others[i]}")
            if wrong == "no order of ranks":
                before = 0 < ticket < mine
            else:
                before = 0 < ticket < mine or (ticket == mine and others[i] < me)
            if not before:
                break
        ticket = 0
    if weak and wrong != "no fence before the content":
        yield fence()


def release(me: int, weak: bool, wrong: str = "") -> Program:
    """Release it: `LockTable._clear`."""
    if wrong == "released too early":
        return
    if weak and wrong != "no fence before the release":
        yield fence()
    yield store(f"ticket{me}", 0)
    yield fence()


def turns(me: int, count: int, times: int, weak: bool, wrong: str) -> Program:
    """Take it, change what it protects, and release it, several times."""
    for _ in range(times):
        yield from take(me, count, weak, wrong)
        yield read("content", 0)
        if wrong == "released too early":
            yield store(f"ticket{me}", 0)
        yield store("content", me + 1)
        yield store("content", 0)
        yield from release(me, weak, wrong)


def explore(count: int, times: int, order: str, wrong: str = "") -> int:
    """Visit every state of ranks that all take one lock."""
    words = {f"ticket{r}": 0 for r in range(count)} | {"content": 0}
    programs = [lambda r=r: turns(r, count, times, order == "weak", wrong) for r in range(count)]
    return Exploration(programs, words, order).run()


@pytest.mark.parametrize("order", ORDERS)
def test_one_rank_is_inside(order: str) -> None:
    """Two ranks, again and again."""
    assert explore(2, 1 if order == "weak" else 2, order) > 100


@pytest.mark.slow
def test_three_ranks() -> None:
    """Three ranks that come at the same time."""
    assert explore(3, 1, "sc") > 1000


@pytest.mark.parametrize(
    ("wrong", "order"),
    [
        ("draw unseen", "sc"),
        ("no order of ranks", "sc"),
        ("released too early", "sc"),
        ("no fence before drawing", "tso"),
        ("no fence after drawing", "tso"),
        ("no fence before the content", "weak"),
        ("no fence before the release", "weak"),
    ],
)
def test_the_model_sees_what_is_done_wrong(wrong: str, order: str) -> None:
    """Without one of the steps two ranks are inside at the same time."""
    with pytest.raises(WrongError, match=r"reads .* not|is overwritten while"):
        explore(2, 1 if order == "weak" else 2, order, wrong)
