"""The measurement of sharing strategies: on real ranks, bounded, and nothing is left of it."""

from __future__ import annotations

from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.errors import SharedMemoryFullError
from nbparallel.session import Session, strategy_bench
from nbparallel.session.diagnostics.measurement import SIZES
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry

NAMES = {"file_descriptor", "file_system", "file_region", "mmap", "copy"}


@pytest.mark.slow
def test_every_strategy_is_measured_on_a_rank(two_ranks: Session) -> None:
    """Every step of every strategy and size has a time; the strategy and the segments stay as they were."""
    assert (min(SIZES), max(SIZES)) == (1 << 10, 256 << 20)
    mine = nbp.zeros(1 << 17)
    before = (nbp.get_sharing_strategy(), two_ranks.statistics().shared_segments)
    found = strategy_bench(two_ranks, sizes=[1 << 20, 1 << 10], seconds=60)
    sizes = ("1.0 KiB", "1.0 MiB")
    assert {row[:2] for row in found.rows} == {(name, size) for name in NAMES for size in sizes}
    assert all(len(row) == len(found.head) and all(row) for row in found.rows)
    assert "left out" not in found.foot
    assert (nbp.get_sharing_strategy(), two_ranks.statistics().shared_segments) == before
    assert mine[0] == 0


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_and_said(two_ranks: Session) -> None:
    """Too little memory, and too little time, leave sizes out; the first size is measured in any case."""
    figures = strategy_bench(two_ranks, strategies=["copy"], sizes=[1024, 1 << 44, 1 << 45], seconds=30)
    assert [row[1] for row in figures.rows] == ["1.0 KiB"]
    assert figures.foot.startswith("left out: from 16.0 TiB on (only ")
    figures = strategy_bench(two_ranks, strategies=["copy"], sizes=[1024, 1 << 20, 1 << 21], seconds=1e-9)
    assert [row[1] for row in figures.rows] == ["1.0 KiB"]
    assert "allows more" in figures.foot
    assert figures.foot in repr(figures)


class Tired(FileDescriptorStrategy):
    """Works for small arrays only."""

    name = "tired"  # type: ignore[assignment]

    def create(self, nbytes: int, *args: Any, **options: Any) -> Any:
        """Refuse."""
        if nbytes > 4 << 20:
            raise SharedMemoryFullError("too large for me")
        return super().create(nbytes, *args, **options)


@pytest.mark.slow
def test_a_strategy_that_fails_is_told_and_the_others_go_on(two_ranks: Session) -> None:
    """It is measured as far as it goes, and named with its reason."""
    with temporary_registry():
        nbp.register_sharing_strategy("tired", Tired())
        figures = strategy_bench(two_ranks, strategies=["tired", "copy"], sizes=[1 << 20, 8 << 20], seconds=9)
    assert {row[:2] for row in figures.rows} == {
        ("tired", "1.0 MiB"),
        ("copy", "1.0 MiB"),
        ("copy", "8.0 MiB"),
    }
    assert figures.foot.startswith("tired failed at 8.0 MiB: SharedMemoryFullError: too large for me\n")


@pytest.mark.parametrize("wrong", [{"sizes": [0]}, {"sizes": [12]}, {"strategies": ["nothing"]}], ids=str)
def test_mistakes_are_told_before_anything_starts(wrong: dict[str, Any]) -> None:
    """A size or strategy that makes no sense is a ValueError; no rank is started for it."""
    with pytest.raises(ValueError, match=r"multiples of 8|unknown sharing strategy"):
        strategy_bench(**wrong)
