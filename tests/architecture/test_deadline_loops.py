"""The search for loops with a deadline finds each form, and takes no other loop for one."""

from __future__ import annotations

import pytest

from tests.architecture.deadline_loops import deadline_loops

LOOPS = [
    "while not there() and time.CLOCK() < limit:\n    time.REST(0.1)",
    "while CLOCK() < limit:\n    if there():\n        break",
    "while time.CLOCK() < limit:\n    for x in some:\n        if x:\n            return x",
    "while not there():\n    assert time.CLOCK() < limit\n    time.REST(0.1)",
    "while True:\n    if there() or time.CLOCK() > limit:\n        return\n    REST(0.1)",
    "for _ in range(100):\n    if there():\n        break\n    time.REST(0.1)",
    "run('while not there() and time.CLOCK() < limit: pass')",
    'run(f"""\n    while not there():\n        assert time.CLOCK() < {limit}\n        time.REST(1)""")',
]
OTHERS = [
    "while time.CLOCK() < end:\n    work()",
    "while not flag[0]:\n    time.REST(0.1)",
    "for x in range(3):\n    work(x)\n    time.REST(0.1)",
    "wait_until(lambda: there() and time.CLOCK() > begun)",
    '"""while not there() and time.CLOCK() < limit: pass"""',
]


def found(text: str) -> list[int]:
    """Look for loops in a text whose calls stand for those that wait."""
    return deadline_loops(text.replace("CLOCK", "monotonic").replace("REST", "sleep"))


@pytest.mark.parametrize("text", LOOPS)
def test_each_form_is_found(text: str) -> None:
    """In code and in programs."""
    assert found(text) == [1]


@pytest.mark.parametrize("text", OTHERS)
def test_no_other_loop_is_found(text: str) -> None:
    """What lasts for a time, waits without a bound, or only paces itself."""
    assert found(text) == []
