"""The text of cells on ranks: there for tracebacks as long as its code may run, and no longer."""

from __future__ import annotations

import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

KEPT = "import linecache; str(list(linecache.cache)).count('<In[')"
LAMBDA = "another = lambda x: later(x)"


def test_a_session_may_run_any_number_of_cells() -> None:
    """Cells that define nothing leave nothing; one that did is shown when its function fails much later."""
    with Session(1) as session:
        session.run("def later(x):\n    return 1 / x")
        before = session.run(KEPT).values[0]
        for number in range(30):
            session.run(f"x = {number}\nx + 1")
        with pytest.raises(ParallelError):
            session.run("x / 0")
        session.run(LAMBDA)
        assert session.run(KEPT).values[0] == before + 1, "the lambda's"
        with pytest.raises(ParallelError) as caught:
            session.run("another(0)")
        (frames,) = [failure.frames for failure in caught.value.failures.values()]
        assert [frame.source for frame in frames] == ["another(0)", LAMBDA, "return 1 / x"]
