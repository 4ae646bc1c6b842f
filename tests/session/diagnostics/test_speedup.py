"""How much faster more ranks are: what is measured, and what follows from it."""

from __future__ import annotations

import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError
from nbparallel.session.diagnostics.measurement import Scaling


def test_amdahl_s_law_is_fitted() -> None:
    """The serial part is found, of numbers within the CPUs; a perfect and a useless speed-up are, too."""
    found = Scaling((1, 2, 4, 8), tuple(0.2 + 0.8 / n for n in (1, 2, 4, 4)), cpus=4)
    assert Scaling((1, 2, 4, 8), (*found.seconds[:3], 9), cpus=4).serial == pytest.approx(0.2)
    assert found.serial == pytest.approx(0.2)
    assert found.speedup == pytest.approx((1, 1.667, 2.5, 2.5), abs=1e-3)
    assert found.efficiency[2] == pytest.approx(0.625)
    assert found.predicted(4) == found.predicted(8) == pytest.approx(2.5)
    text = repr(found)
    assert "20 % of the work is not divided, so the speed-up stays below 5.0" in text
    assert "4 CPUs here: more ranks than that take turns" in text
    assert Scaling((1, 2), (1.0, 0.5), cpus=2).serial == pytest.approx(0, abs=1e-9)
    assert Scaling((1, 2), (1.0, 1.1), cpus=2).serial == 1
    assert Scaling((2, 4), (1.0, 0.5), cpus=4).speedup == (2, 4), "the smallest number is the measure"
    assert Scaling((4, 8), (1.0, 0.5), cpus=4).serial is None
    assert "Amdahl" not in repr(Scaling((1,), (1.0,), cpus=4))
    flat = repr(Scaling((1, 2, 4), (1.0, 0.98, 1.05), cpus=4))
    assert "100 % of the work is not divided, so the speed-up will hardly exceed the 1.02" in flat


def test_a_function_is_measured_in_turns() -> None:
    """Each number of ranks three times, none twice in a row; ranks divide the work; no session is left."""
    order = nbp.zeros(10)

    def work() -> None:
        import time

        from nbparallel.distributed import get_rank, get_world_size

        if get_rank() == 0:
            order[0] += 1
            order[int(order[0])] = get_world_size()
        time.sleep(0.1 / get_world_size())

    found = nbp.scaling(work, [2, 1], progress=False)
    assert found.counts == (1, 2)
    assert list(order) == [6, 1, 2, 1, 2, 1, 2, 0, 0, 0]
    assert 0.1 <= found.seconds[0] < 3
    assert 0.05 <= found.seconds[1] < 3


def test_what_ranks_held_is_not_there() -> None:
    """A `NameError` says so, in text and in a notebook; wrong counts are refused before a rank starts."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def work(): return held", names)
    with pytest.raises(ParallelError, match="'held' is not defined") as caught:
        nbp.scaling(names["work"], [1], progress=False)  # type: ignore[arg-type]
    (note,) = caught.value.__notes__
    assert note.startswith("it ran on fresh ranks, which hold nothing of earlier cells")
    assert note in caught.value._render_traceback_()
    with pytest.raises(ValueError, match="numbers of ranks, as in 1,2,4"):
        nbp.scaling(abs, [])
