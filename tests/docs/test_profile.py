"""What benchmarks/results says of where the time goes is measured by this."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.operations import parts, profile_operations
from tests.harness.ranks import run_ranks


@pytest.mark.alone
@pytest.mark.parametrize("name", profile_operations.SMALL)
def test_parts_are_less_than_the_whole(monkeypatch: Any, name: str) -> None:
    """Rank 0 plays all ranks, and leaves the control segment so that the others can end."""
    monkeypatch.setattr(parts, "ROUNDS", 3)
    for _ in range(5):  # parts and whole are timed one after the other: a pause may hit one of them
        found = profile_operations.time_alone(*profile_operations.SMALL[name])
        own = {key: found[key] for key in ("numpy", "words", "fence", "line")}
        assert all(seconds > 0 for seconds in own.values()), found
        if sum(own.values()) < found["whole"]:
            return
    pytest.fail(f"the parts take longer than the whole: {found}")


def test_tables(monkeypatch: Any) -> None:
    """Every operation has its row; small arrays do here."""
    monkeypatch.setattr(profile_operations, "LARGE", 1 << 20)
    monkeypatch.setattr(profile_operations, "BATCH", 5)
    table = profile_operations.large(2, rounds=1)
    for operation in profile_operations.MOVED:
        for kind in ("shared", "private"):
            assert f"| {operation}, {kind} |" in table
    for name in ("all_reduce, 8 B, 2 ranks", "ping-pong, 8 B, one way"):
        outcomes = run_ranks(2, lambda c, name=name: profile_operations.time_together(c, name, 1))
        for outcome in outcomes:
            assert outcome.error is None, outcome
            assert outcome.value["wall"] > 0
            assert outcome.value["yields"] >= 0


def test_what_has_to_move() -> None:
    """As many bytes as one who copies everything once."""
    assert profile_operations.has_to_move("gather", 4, shared=True) == (2.0, True)
    assert profile_operations.has_to_move("scatter", 4, shared=True) == (0.5, False)
    assert profile_operations.has_to_move("broadcast", 4, shared=True) == (1.5, False)
    assert profile_operations.has_to_move("all_to_all", 2, shared=False) == (2.0, False)
