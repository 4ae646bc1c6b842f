"""The command that says whether processor time grows as the model of large groups says: it can say no."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.operations import trials
from benchmarks.operations.growth import COPY, Row, growths, offences
from tests.harness.ranks import run_ranks

RANKS = (2, 4, 8, 16, 32, 64)
GATHER = Row("all_gather", 8, False)


def figures(small: Any, large: Any = lambda n: 1e-3) -> dict[Row, dict[int, float]]:
    """Return made-up times of small and of large arrays, 16 times as large, by the number of ranks."""
    found = {GATHER: {n: small(n) for n in RANKS}}
    for nbytes, seconds in ((1 << 20, lambda n: 1e-3), (16 << 20, large)):
        found[Row("send", nbytes, True)] = {n: seconds(n) for n in RANKS}
        found[Row(COPY, nbytes, True)] = dict.fromkeys(RANKS, nbytes * 1e-09)
    return found


def test_linear_growth_is_as_modelled() -> None:
    """Constants, a step where there are more ranks than cores, and memory that is slower than a cache."""
    for small in (lambda n: 1e-6, lambda n: 5e-6 + n * 1e-6, lambda n: n * (1e-6 if n <= 4 else 1e-3)):
        times = figures(small, lambda n: 16e-3)
        assert not list(offences(growths(times, 4)))
        assert all(growth.as_modelled for growth in growths(times, 4).values())
    slower = figures(lambda n: 1e-6, lambda n: 64e-3)
    assert list(offences(growths(slower, 4)))
    slower[Row(COPY, 16 << 20, True)] = dict.fromkeys(RANKS, 4 * 0.016)
    assert not list(offences(growths(slower, 4)))


def test_worse_growth_is_named() -> None:
    """What is hidden by constants among few ranks, and one that only a machine with a core each shows."""
    for cores in (2, 64):
        (found,) = offences(growths(figures(lambda n: 2e-4 + n**2 * 1e-6), cores))
        assert found.startswith("all_gather, 8 B, private: grows with ranks to the power of 1."), found
    (found,) = offences(growths(figures(lambda n: 1e-6, lambda n: 256e-3), 2))
    assert found == "send, 16 MB, shared: grows with bytes to the power of 2.0"


@pytest.mark.slow
def test_every_operation_is_right() -> None:
    """Also with parts that are smaller than an element, on private and on shared arrays."""

    def work(c: Any) -> None:
        rows = scaling.rows_of(scaling.OPERATIONS, (8, 4096))
        assert {row.operation for row in rows} == trials.TRIALS.keys()
        for cpu, wall in scaling.times_on_rank(c, rows, 0.0):
            assert 0 < cpu < 10
            assert 0 < wall < 10

    for outcome in run_ranks(3, work, seconds=30):
        if outcome.error is not None:
            raise outcome.error


def test_a_wrong_result_is_not_timed(monkeypatch: Any) -> None:
    """On no rank, also where the result happens to be right."""
    monkeypatch.setitem(
        trials.TRIALS, "gather", lambda s: trials.Trial(lambda: None, lambda: s.rank > 0)
    )  # fmt: skip

    def work(c: Any) -> None:
        with pytest.raises(AssertionError, match="is wrong on rank"):
            scaling.times_on_rank(c, [Row("gather", 8, False)], 0.0)

    for outcome in run_ranks(2, work, seconds=30):
        if outcome.error is not None:
            raise outcome.error


@pytest.mark.slow
def test_the_command_prints_and_judges(monkeypatch: Any, capfd: Any) -> None:
    """The exit status is that of the verdict, whose rows are named."""
    arguments = "--ranks 2 3 --operations barrier ring --bytes 8 4096 --seconds 0 --launches 1 --speed-up"
    monkeypatch.setattr(scaling, "LEAST_SPEED_UP", 0.0)
    assert scaling.main([*arguments.split()]) in (0, 1)
    printed = capfd.readouterr().out
    assert printed.count("| barrier |") == 3  # alone, together, and on all cores beside one
    for row in ("ring, 8 B, private", "ring, 4 KB, shared", "copy, 8 B, shared"):
        assert f"| {row} |" in printed, printed
    made_up = scaling.Measured(
        {GATHER: {n: scaling.Sample(n**2 * 1e-6, n**2 * 1e-6, 1.0) for n in RANKS}}
    )  # fmt: skip
    monkeypatch.setattr(scaling, "alone", lambda *_: {})
    monkeypatch.setattr(scaling, "measure", lambda *_, **__: made_up)
    monkeypatch.setattr(scaling, "LEAST_CORES", 1000)
    assert scaling.main(["--quick"]) == 1
    assert "all_gather, 8 B, private: grows with ranks to the power of 2.0" in capfd.readouterr().out


def test_arrays_that_do_not_fit_are_left_out() -> None:
    """Two arrays on each rank, shared and private."""
    rows = [Row("ring", 8, False), Row("ring", 1 << 20, False)]
    assert scaling.fitting(rows, 4, 16 << 20) == rows
    assert scaling.fitting(rows, 4, 15 << 20) == rows[:1]
