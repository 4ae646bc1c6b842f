"""The text of cells on ranks: that of the last ones is there for tracebacks."""

from __future__ import annotations

import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

KEPT = "import linecache; str(list(linecache.cache)).count('<ipython-input-')"


@pytest.mark.slow
def test_a_session_may_run_any_number_of_cells() -> None:
    """The text of the last ones is kept: a function that one of them defined is shown when it fails."""
    with Session(1) as session:
        session.run("get_ipython().compile.KEPT = 20")
        for number in range(30):
            session.run(f"x = {number}\nx + 1")
        session.run("def later(x):\n    return 1 / x")
        assert session.run(KEPT).values[0] == 20
        with pytest.raises(ParallelError) as caught:
            session.run("later(0)")
        (frames,) = [failure.frames for failure in caught.value.failures.values()]
        assert [frame.source for frame in frames] == ["later(0)", "return 1 / x"]


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    ("cell", "times", "most"),
    [
        ("for _ in range(50): print('x' * 100_000)", 1, 500_000),
        ("try: 1 / 0\nexcept ZeroDivisionError as error: get_ipython().showtraceback()", 3, 100_000),
        ("b = [1, 2, 3]\n" * 200 + "1 / 0", 5, 1_000_000),
    ],
)
def test_cells_leave_no_memory_behind(cell: str, times: int, most: int) -> None:
    """What a cell printed, and what its traceback was made from, is not kept on the rank."""
    with Session(1) as session:

        def run() -> None:
            try:
                session.run(cell)
            except ParallelError:
                pass

        run()
        run()
        session.run("import gc, tracemalloc\ngc.collect()\ntracemalloc.start()")
        for _ in range(times):
            run()
        left = session.run("gc.collect()\ntracemalloc.get_traced_memory()[0]").values[0]
        assert left < most


@pytest.mark.slow
def test_an_error_that_was_caught_is_shown_with_its_line_in_a_later_cell() -> None:
    """The cell has ended and defined nothing; what it raised can still be looked at."""
    with Session(1) as session:
        session.run("try:\n    1 / 0  # here\nexcept ZeroDivisionError as error:\n    kept = error")
        session.run("import traceback")
        assert "1 / 0  # here" in session.run("traceback.print_exception(kept)").ranks[0].stderr
