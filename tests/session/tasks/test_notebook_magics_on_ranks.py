"""The notebook's magics inside a cell for ranks: refused with what to write, never a second set of ranks."""

from __future__ import annotations

from pathlib import Path

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


def test_a_magic_that_ranks_lack_says_where_to_load_it(two_ranks: Session) -> None:
    """One of the notebook's own, or of an extension that was loaded there."""
    with pytest.raises(ParallelError, match=r"`%mine` not found\. Ranks have .* in a cell for ranks"):
        two_ranks.run("%mine 3")


MPI = """
class Communicator:
    def Get_size(self): return SIZE
COMM_WORLD = Communicator()
def Is_initialized(): return True
"""


@pytest.mark.parametrize("size", [1, 2])
def test_mpi_on_a_rank_says_once_that_it_is_alone(two_ranks: Session, tmp_path: Path, size: int) -> None:
    """Below the cell that imports it; not where a launcher of MPI has made a world."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").touch()
    (tmp_path / "mpi4py" / "MPI.py").write_text(MPI.replace("SIZE", str(size)))
    cell = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport mpi4py.MPI"
    notes = two_ranks.run(cell).notes
    assert [note.partition(", this one")[0] for note in notes] == [
        "MPI.COMM_WORLD on a rank has one process"
    ] * (2 - size)
    assert two_ranks.run("mpi4py.MPI; None").notes == ()


def test_every_magic_of_the_notebook_is_refused() -> None:
    """The engine, which cannot import them, lists just those that there are."""
    from nbparallel_magics.magics import ParallelMagics

    assert set(shell.LINE_MAGICS) == set(ParallelMagics.magics["line"])
    assert set(shell.CELL_MAGICS) == set(ParallelMagics.magics["cell"])
