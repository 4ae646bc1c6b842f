"""The figures of benchmarks/results: what they are measured by has to notice a wrong result."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adapters import Ours
from benchmarks.operations.goals import goals
from benchmarks.operations.lines import KIB, LARGE, Line, lines
from benchmarks.operations.rounds import measure
from tests.harness.ranks import run_ranks

SIZES = (8, KIB)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_line_is_measured(ranks: int) -> None:
    """Ours does every line, on shared and on private arrays, and results are right."""

    def work(c: Any) -> Any:
        contenders = {"shared": Ours(c, shared=True), "private": Ours(c, shared=False)}
        return measure(contenders, lines(ranks, SIZES), contenders["private"], 0.001)

    for outcome in run_ranks(ranks, work, seconds=60):
        if outcome.error is not None:
            raise outcome.error
        assert set(outcome.value) == {line.key for line in lines(ranks, SIZES)}
        for line in lines(ranks, SIZES):
            assert set(outcome.value[line.key]) == ({"shared"} if line.view else {"shared", "private"})
            assert all(second > 0 for times in outcome.value[line.key].values() for second in times)


class Forgetful(Ours):
    """Does nothing when it should combine or move."""

    def all_reduce(self, x: Any) -> Any:
        """Leave it as it is."""
        return lambda: None

    def gather(self, out: Any, x: Any) -> Any:
        """Fill nothing."""
        return lambda: None


@pytest.mark.parametrize("operation", ["all_reduce", "gather"])
def test_a_wrong_result_is_not_timed(operation: str) -> None:
    """On no rank, also where the result happens to be right."""

    def work(c: Any) -> Any:
        adapter = Forgetful(c, shared=False)
        with pytest.raises(AssertionError, match=f"{operation}, 1024 B is wrong"):
            measure({"forgetful": adapter}, [Line(operation, KIB)], adapter, 0.001)

    for outcome in run_ranks(2, work, seconds=30):
        if outcome.error is not None:
            raise outcome.error


def test_goals_compare_with_the_right_peer() -> None:
    """A goal is met, missed, or not measured where the peer was not."""
    sixteen = {"shared": 1.0, "private": 3.0, "gloo": 9.0}
    verdicts = {
        goal.text: goal.is_met(sixteen, {"MPICH": 5.0, "Open MPI": 3.5}, 1.0, 0.6)
        for goal in goals(Line("all_reduce", LARGE), 2)
    }
    assert verdicts == {
        "shared ≥ 6 × gloo": True,
        "shared ≥ 8 × gloo": True,
        "shared ≥ 4 × MPI": False,
        "private ≥ 3 × gloo": True,
        "private ≥ 1.3 × MPI": False,
        "≥ 0.7 of the traffic limit": False,
    }
    latency = goals(Line("all_reduce", 8), 4)
    seconds = {"shared": 11e-6}
    assert [goal.is_met(seconds, {"MPICH": 13e-6}, 1.0, 1.0) for goal in latency] == [None, None, True, True]
