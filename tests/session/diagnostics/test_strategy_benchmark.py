"""The measurement of sharing strategies: on real ranks, bounded, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.errors import SharedMemoryFullError
from nbparallel.session import Session, strategy_bench
from nbparallel.session.diagnostics.strategy_benchmark import SIZES, StrategyTime, StrategyTimes
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry

NAMES = {"file_descriptor", "file_system", "file_region", "mmap", "copy"}


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    """Give two ranks to all tests of this module."""
    with Session(2) as session:
        session.run("pass")
        yield session


@pytest.mark.slow
def test_every_strategy_is_measured_on_a_rank(two: Session) -> None:
    """Every step of every strategy and size has a time; the strategy and the segments stay as they were."""
    assert (min(SIZES), max(SIZES)) == (1 << 10, 256 << 20)
    mine = nbp.zeros(1 << 17)
    before = (nbp.get_sharing_strategy(), two.statistics().shared_segments)
    found = strategy_bench(two, sizes=[1 << 20, 1 << 10], seconds=60)
    sizes = (1 << 10, 1 << 20)
    assert {(time.strategy, time.nbytes) for time in found.times} == {(n, s) for n in NAMES for s in sizes}
    assert all(step > 0 for time in found.times for step in time.seconds)
    assert all(time.runs >= 3 for time in found.times)
    assert found.left_out == ()
    assert (nbp.get_sharing_strategy(), two.statistics().shared_segments) == before
    assert mine[0] == 0


@pytest.mark.slow
def test_what_does_not_fit_is_left_out_and_said(two: Session) -> None:
    """Too little memory, and too little time, leave sizes out; the first size is measured in any case."""
    figures = strategy_bench(two, strategies=["copy"], sizes=[1024, 1 << 44, 1 << 45], seconds=30)
    assert {time.nbytes for time in figures.times} == {1024}
    (reason,) = figures.left_out
    assert reason.startswith("left out: from 16.0 TiB on (only ")
    figures = strategy_bench(two, strategies=["copy"], sizes=[1024, 1 << 20, 1 << 21], seconds=1e-9)
    assert [(time.nbytes, time.runs) for time in figures.times] == [(1024, 1)]
    assert "allows more" in figures.left_out[0]
    assert figures.left_out[0] in repr(figures)


class Tired(FileDescriptorStrategy):
    """Works for small arrays only."""

    name = "tired"  # type: ignore[assignment]

    def create(self, nbytes: int, *args: Any, **options: Any) -> Any:
        """Refuse."""
        if nbytes > 4 << 20:
            raise SharedMemoryFullError("too large for me")
        return super().create(nbytes, *args, **options)


@pytest.mark.slow
def test_a_strategy_that_fails_is_told_and_the_others_go_on(two: Session) -> None:
    """It is measured as far as it goes, and named with its reason."""
    with temporary_registry():
        nbp.register_sharing_strategy("tired", Tired())
        figures = strategy_bench(two, strategies=["tired", "copy"], sizes=[1 << 20, 8 << 20], seconds=30)
    assert {(t.strategy, t.nbytes) for t in figures.times} == {
        ("tired", 1 << 20),
        ("copy", 1 << 20),
        ("copy", 8 << 20),
    }
    assert figures.left_out == ("tired failed at 8.0 MiB: SharedMemoryFullError: too large for me",)


@pytest.mark.parametrize("wrong", [{"sizes": [0]}, {"sizes": [12]}, {"strategies": ["nothing"]}], ids=str)
def test_mistakes_are_told_before_anything_starts(wrong: dict[str, Any]) -> None:
    """A size or strategy that makes no sense is a ValueError; no rank is started for it."""
    with pytest.raises(ValueError, match=r"multiples of 8|unknown sharing strategy"):
        strategy_bench(**wrong)


def test_times_read_well() -> None:
    """One row for each size and strategy, with the sum; what was left out is said, also as HTML."""
    line = StrategyTime("slow", 1 << 10, (1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6), 5)
    found = StrategyTimes((line,), ("left out: from 1.0 GiB on (<no time>)",))
    row = repr(found).splitlines()[2]
    assert row.split()[0] == "slow"
    assert row.split("  ")[-1].strip() == "21 µs"
    assert "(&lt;no time&gt;)" in found._repr_html_()
    assert "medians of" in repr(StrategyTimes((), ()))
