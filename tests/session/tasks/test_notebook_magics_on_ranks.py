"""The notebook's magics inside a cell for ranks: refused with what to write, never a second set of ranks."""

from __future__ import annotations

import pytest

from nbparallel.engine import shell
from nbparallel.errors import ParallelError
from nbparallel.session import Session


@pytest.mark.slow
def test_f68_nested_cells_are_refused() -> None:
    """Wherever they stand, also after `%load_ext` on the rank; the rank goes on with the next cell."""
    with Session(2) as session:
        session.run("kept = rank")
        assert "there is nothing to load" in session.run("%load_ext nbparallel").ranks[0].stdout
        for cell, magic in (
            ("%%parallel -n 2\nx = 1", "%%parallel"),
            ("for _ in range(2):\n    %parallel x = 1", "%parallel"),
            ("%%rank 0\nx = 1", "%%rank"),
            ("%parallel_stop", "%parallel_stop"),
            ("%share kept", "%share"),
        ):
            with pytest.raises(ParallelError) as caught:
                session.run(cell)
            assert f"UsageError on ranks 0-1, line {1 + ('for' in cell)}: {magic} works in the noteb" in str(
                caught.value
            )
        assert session.run("kept").values == [0, 1]


@pytest.mark.slow
def test_a_magic_that_ranks_lack_says_where_to_load_it(two_ranks: Session) -> None:
    """One of the notebook's own, or of an extension that was loaded there."""
    with pytest.raises(ParallelError, match=r"`%mine` not found\. Ranks have .* in a cell for ranks"):
        two_ranks.run("%mine 3")


def test_every_magic_of_the_notebook_is_refused() -> None:
    """The engine, which cannot import them, lists just those that there are."""
    from nbparallel_magics.magics import ParallelMagics

    assert set(shell.LINE_MAGICS) == set(ParallelMagics.magics["line"]) - {"debug"}  # as in IPython there
    assert set(shell.CELL_MAGICS) == set(ParallelMagics.magics["cell"])
