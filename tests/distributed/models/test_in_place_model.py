"""Arrays that others read where they lie (`in_place`), explored in every interleaving, also with a failure.

Each member has as many slices of its array as there are members.  It combines one slice of all arrays into
its own array, then fetches the others' slices.  The user writes the array before and after each operation,
and as soon as a member has failed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.distributed.models.exploration import (
    ORDERS,
    Exploration,
    Program,
    WrongError,
    choose,
    fence,
    load,
    store,
    until,
)

RESULT, GARBAGE = 1000, 7
Step = Generator[tuple[Any, ...], Any, bool]
"""Part of a program; whether the operation goes on."""


@dataclass(frozen=True)
class Group:
    """Operations, who may fail in them, and what is done wrong on purpose."""

    operations: int = 2
    members: int = 2
    weak: bool = False
    fails: bool = False
    wrong: str = ""

    def others(self, me: int) -> list[int]:
        """Return the other members."""
        return [m for m in range(self.members) if m != me]

    def explore(self, order: str) -> int:
        """Visit every state; returns how many there are."""
        members = range(self.members)
        words = {f"{part}{m}": 0 for part in ("arrive", "failed") for m in members}
        words |= {f"x{m}.{part}": 0 for m in members for part in members}
        programs = [lambda me=me: context(self, me) for me in members]
        return Exploration(programs, words, order).run()


def meet(g: Group, me: int, arrivals: int) -> Step:
    """Arrive and wait for all: `SlotProtocol.synchronize`; False: a member has failed."""
    if g.weak:
        yield fence()
    yield store(f"arrive{me}", arrivals)
    yield fence()
    for m in g.others(me):
        if (yield until((f"arrive{m}", arrivals), (f"failed{m}", 1))):
            return False
    if g.weak:
        yield fence()
    return True


def confirm(g: Group, me: int) -> Step:
    """Look whether a member has failed, after its array was read: `InPlaceReading.confirm`."""
    if g.wrong == "do not confirm":
        return True
    if g.weak and g.wrong != "no fence before confirming":
        yield fence()
    for m in g.others(me):
        if (yield load(f"failed{m}")):
            return False
    return True


def may_fail(g: Group, me: int) -> Step:
    """Member 0 may fail here: it says so before its user writes the array again."""
    if not g.fails or me or not (yield choose(2)):
        return True
    if g.wrong != "give the array back first":
        yield store("failed0", 1)
        yield fence()
    for part in range(g.members):
        yield store(f"x0.{part}", GARBAGE)
    if g.wrong == "give the array back first":
        yield fence()
        yield store("failed0", 1)
    yield fence()
    return False


def read_all(g: Group, me: int, content: int, *, combine: bool) -> Step:
    """Read one slice of every other array, or each member's own: what is used must be `content`."""
    seen: tuple[int, ...] = ()
    for m in g.others(me):
        seen = (*seen, (yield load(f"x{m}.{me if combine else m}")))
    if not (yield from confirm(g, me)):
        return False
    if any(value != content for value in seen):
        raise WrongError(f"member {me} reads {list(seen)}, not {content}")
    return True


def context(g: Group, me: int) -> Program:
    """Take part in all operations."""
    arrivals = 0
    for operation in range(g.operations):
        content = 100 * (operation + 1)
        for part in range(g.members):
            yield store(f"x{me}.{part}", content)
        arrivals += 1
        if not (yield from meet(g, me, arrivals)):
            return
        if not (yield from may_fail(g, me)) or not (yield from read_all(g, me, content, combine=True)):
            return
        yield store(f"x{me}.{me}", RESULT + content)
        if g.wrong != "do not meet before fetching":
            arrivals += 1
            if not (yield from meet(g, me, arrivals)):
                return
        if not (yield from may_fail(g, me)):
            return
        if not (yield from read_all(g, me, RESULT + content, combine=False)):
            return
        for m in g.others(me):
            yield store(f"x{me}.{m}", RESULT + content)
        if g.wrong != "leave at once":
            arrivals += 1
            if not (yield from meet(g, me, arrivals)):
                return


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_used_was_the_members(order: str, fails: bool) -> None:
    """No slice that counts is read before it is complete, or after its owner has got its array back."""
    assert Group(weak=order == "weak", fails=fails).explore(order) > 50


def test_three_members() -> None:
    """With one who is late while two go on."""
    assert Group(1, members=3).explore("sc") > 500


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ("sc", "do not meet before fetching"),
        ("sc", "leave at once"),
        ("sc", "do not confirm"),
        ("sc", "give the array back first"),
        ("weak", "no fence before confirming"),
    ],
)
def test_the_model_sees_what_is_done_wrong(order: str, wrong: str) -> None:
    """Without a meeting, the look afterwards, its fence, or the record before the array is given back."""
    failing = wrong not in ("do not meet before fetching", "leave at once")
    group = Group(weak=order == "weak", fails=failing, wrong=wrong)
    with pytest.raises(WrongError, match="reads"):
        group.explore(order)
