"""Sharing strategies and the notebook's names: what `copy` copies, what `file_region` moves."""

import pytest

from nbparallel.errors import StrategyUnavailableError
from nbparallel.session.names.delivery import LATER
from nbparallel.sharing import set_sharing_strategy
from nbparallel.testing.strategies import temporary_registry
from tests.session.names.pair import Pair


@pytest.fixture
def notebook():
    """Make a notebook with one rank, in this process."""
    with temporary_registry():
        made = Pair()
        yield made
        made.close()


def test_copy_copies(notebook):
    """Under `copy` an array travels as any other object: the rank's is its own, and only a change is sent."""
    set_sharing_strategy("copy")
    notebook.type("import numpy as np\nx = np.arange(200_000.0)\nold = x")
    assert notebook.run("x[0] = -1\nx[0]") == -1
    assert notebook.notebook["x"] is notebook.notebook["old"]
    assert notebook.notebook["x"][0] == 0
    assert not notebook.kernel_store.is_shared(notebook.notebook["x"])
    assert notebook.run("x[0]") == -1, "nothing has changed in the notebook"
    assert notebook.sent() == []
    notebook.type("x[1] = 7")
    assert notebook.run("(x[0], x[1])") == (0, 7)


def test_copy_has_nothing_to_share(notebook):
    """`%share` and `--share` say that there is no shared memory, and name a strategy that has."""
    set_sharing_strategy("copy")
    notebook.type("import numpy as np\nx = np.arange(10.0)")
    with pytest.raises(StrategyUnavailableError, match="file_descriptor"):
        notebook.prepare("x", share=["x"])
    with pytest.raises(StrategyUnavailableError):
        notebook.names.share(["x"], notebook.notebook)


@pytest.mark.parametrize("held", [False, True])
def test_who_still_holds_a_packed_array_is_told(notebook, held):
    """A list that holds the array from before `--share` sees no writes any more; one line says so."""
    notebook.type("import numpy as np\nx = np.arange(10.0)")
    assert notebook.run("float(x.sum())") == 45
    notebook.type("things = [x]" if held else "things = []")
    notebook.run("1")  # what the last cell held has gone
    notebook.run("x[0] = 1", share=["x"])
    *moved, written = notebook.notes
    assert [("still has the old array" in note) for note in moved] == [True] * held
    assert written == "ranks may write x from now on" + LATER


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system", "file_region", "mmap"])
def test_a_packed_array_is_moved_to_be_written(notebook, strategy):
    """Ranks may only read its neighbours, so `--share` moves it out, with every name that sees it."""
    set_sharing_strategy(strategy)
    notebook.type("import numpy as np\nx, y = np.arange(10.0), np.arange(20.0)\nview = x[2:5]\nalias = x")
    assert notebook.run("float(x.sum() + y.sum() + view.sum())") == 45 + 190 + 9
    ours, store = notebook.notebook, notebook.kernel_store
    assert store.location(ours["x"]).segment == store.location(ours["y"]).segment
    assert notebook.run("x[2] = 100\nfloat(view[0])", share=["x"]) == 100
    assert ours["x"] is ours["alias"]
    assert ours["view"][0] == 100
    assert store.location(ours["x"]).segment == store.location(ours["view"]).segment
    assert store.location(ours["x"]).segment != store.location(ours["y"]).segment
    assert not store.location(ours["y"]).for_all
    with pytest.raises(ValueError, match="read-only"):
        notebook.run("y[0] = 1")
    assert notebook.run("float(y.sum())") == 190
