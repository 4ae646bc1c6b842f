"""When a rank looks through all its objects for garbage: not in the middle of a cell that is timed."""

from __future__ import annotations

import pytest

from nbparallel.engine.main import MANY_MODULES
from nbparallel.session import Session

IMPORT = "sys.modules.update({{f'made_{{{offset} + i}}': types.ModuleType('made') for i in range({count})}})"


def full_collections(session: Session) -> int:
    """Return how many there were on a rank."""
    return int(session.run("gc.get_stats()[2]['collections']").values[0])


@pytest.mark.slow
def test_a_cell_that_imports_much_ends_with_a_full_collection() -> None:
    """It is due soon, and takes 13 ms after matplotlib: then every rank does it before it reports."""
    with Session(1) as session:
        session.run("import gc, sys, types")
        before = full_collections(session)
        session.run(IMPORT.format(offset=0, count=MANY_MODULES - 1))
        assert full_collections(session) == before
        session.run(IMPORT.format(offset=1000, count=MANY_MODULES))
        assert full_collections(session) == before + 1


@pytest.mark.slow
def test_who_has_switched_collecting_off_gets_none() -> None:
    """`gc.disable()` holds for it as well."""
    with Session(1) as session:
        session.run("import gc, sys, types\ngc.disable()")
        before = full_collections(session)
        session.run(IMPORT.format(offset=0, count=MANY_MODULES))
        assert full_collections(session) == before
