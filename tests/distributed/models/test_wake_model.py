"""Falling asleep and waking up (`waiting`), explored in every interleaving: no wake-up is ever lost.

The slice of a sleep, which ends it after 50 ms, is left out here: nobody may need it.
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
    sleep,
    store,
)

WORDS = ("word0", "word1", "bell0", "bell1", "parked0", "parked1")


def announce(me: int, value: int, weak: bool, wrong: str) -> Program:
    """Write a word, and wake who is parked for this process: `Waiter.announce`."""
    if weak:
        yield fence()
    if wrong != "look who sleeps before writing":
        yield store(f"word{me}", value)
    if wrong != "no fence after the word":
        yield fence()
    parked = yield load(f"parked{1 - me}")
    if wrong == "look who sleeps before writing":
        yield store(f"word{me}", value)
    if parked:
        bell = yield load(f"bell{me}")
        if wrong != "no bell":
            yield store(f"bell{me}", bell + 1)
        yield fence()  # the system call


def wait(me: int, value: int, wrong: str) -> Program:
    """Sleep until the other's word is so large: `Waiter.until` and `_sleep`."""
    peer = 1 - me
    while (yield load(f"word{peer}")) < value:
        yield store(f"parked{me}", 1)
        if wrong == "fence before the bell":
            yield fence()
        bell = 0
        if wrong != "read the bell last":
            bell = yield load(f"bell{peer}")
        if wrong not in ("no fence after parking", "fence before the bell"):
            yield fence()
        seen = 0
        if wrong != "do not look again":
            seen = yield load(f"word{peer}")
        if wrong == "read the bell last":
            bell = yield load(f"bell{peer}")
        if seen < value:
            yield sleep(f"bell{peer}", bell)
        yield store(f"parked{me}", 0)


def both(me: int, turns: int, first: int, weak: bool, wrong: str) -> Program:
    """Announce and wait in turns; only one of the two begins by waiting, or nobody."""
    for turn in range(1, turns + 1):
        if me == first:
            yield from wait(me, turn, wrong)
        yield from announce(me, turn, weak, wrong)
        if me != first:
            yield from wait(me, turn, wrong)


def explore(order: str, turns: int, first: int = -1, *, wrong: str = "") -> int:
    """Visit every state of two processes that wait for each other again and again."""
    weak = order == "weak"
    programs = [lambda me=me: both(me, turns, first, weak, wrong) for me in (0, 1)]
    return Exploration(programs, dict.fromkeys(WORDS, 0), order).run()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", [-1, 1])
def test_whoever_sleeps_is_woken(order: str, first: int) -> None:
    """In a barrier (nobody first) and in a ping-pong."""
    assert explore(order, 1 if order == "weak" and first < 0 else 2, first) > 100


@pytest.mark.parametrize(
    ("wrong", "order"),
    [
        ("no fence after the word", "tso"),
        ("no fence after the word", "weak"),
        ("no fence after parking", "tso"),
        ("no fence after parking", "weak"),
        ("fence before the bell", "weak"),
        ("look who sleeps before writing", "sc"),
        ("read the bell last", "sc"),
        ("do not look again", "sc"),
        ("no bell", "sc"),
    ],
)
def test_the_model_sees_what_is_done_wrong(wrong: str, order: str) -> None:
    """Without one of the fences, or in another order, somebody sleeps for ever: on x86 as well."""
    with pytest.raises(WrongError, match="waits for ever"):
        explore(order, 2, 1, wrong=wrong)
    if "fence" in wrong:
        assert explore("sc", 2, 1, wrong=wrong) > 100  # where memory has a strict order, none is needed
