"""What a rank deletes is gone there, and no longer holds memory."""

from contextlib import nullcontext

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.sharing import current_store
from tests.session.names.pair import Pair


@pytest.fixture
def pair():
    """Return a notebook and a rank in this process."""
    pair = Pair()
    yield pair
    pair.close()


def looked_at(store):
    """Return how many segments of others arrays of a store look at."""
    store.drain()
    return sum(not record.own and record.phase == "live" for record in store.segments())


def test_a_deleted_array_is_let_go_when_the_cell_ends(pair):
    """The last reference on the rank decides, not what the notebook delivered: a view, or a list."""
    pair.type("import numpy as np; x = np.arange(100_000.); y = x[::2]")
    assert pair.run("float(x[-1] + y[-1])") == 199_997
    assert looked_at(pair.rank_store) == 1
    pair.run("z = x[1:]; del x, y")
    pair.rank_names.release_unbound()
    assert looked_at(pair.rank_store) == 1
    assert float(pair.rank["z"][0]) == 1
    pair.run("parts = [z]; del z")
    assert looked_at(pair.rank_store) == 1
    pair.run("parts = None")
    assert looked_at(pair.rank_store) == 0


def test_a_name_that_is_bound_to_none_is_the_ranks_own(pair):
    """An array that died is told apart from None, which the rank assigned."""
    pair.type("import numpy as np; x = np.arange(100_000.)")
    pair.run("float(x[0])")
    pair.run("x = None")
    assert pair.rank_names.is_own("x")
    assert pair.run("x is None") is True


def test_a_name_that_comes_again_is_attached_again(pair):
    """Another name for the same memory is delivered after the first one had been deleted on the rank."""
    pair.type("import numpy as np; x = np.arange(100_000.)")
    pair.run("float(x[0])")
    pair.run("del x")
    pair.type("y = x")
    assert pair.run("float(y[-1])") == 99_999


def test_writing_to_a_view_names_the_array_that_was_deleted(pair):
    """The error finds the notebook's name by where the bytes lie, also when the rank has deleted it."""
    pair.type("import numpy as np; x = np.arange(100_000.)")
    pair.run("float(x[0])")
    pair.run("part = x[10:20]; del x")
    assert pair.rank_names.name_of(pair.rank["part"], "part") == "x"
    assert pair.rank_names.name_of(np.zeros(3), "part") is None


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    "cell", ["x[1:]", "def f(a):\n    view = a[1:]\n    1 / 0\nf(x)", "def f(a): yield a[1:]\nnext(f(x))"]
)
def test_a_cell_that_is_over_holds_nothing(cell):
    """Neither the value that was shown nor the frames of a failure keep an array on the rank."""
    names = {"x": nbp.zeros(1_000_000)}
    segment = current_store().location(names["x"]).segment

    def forget():
        from IPython import get_ipython

        for name in ("x", "f"):
            get_ipython().user_ns.pop(name, None)

    def look():
        nbp.sharing.current_store().drain()
        return [record.segment for record in nbp.segments() if not record.own]

    with nbp.Session(1) as session:
        failing = pytest.raises(nbp.errors.ParallelError, match="division") if "/" in cell else nullcontext()
        with failing:
            session.run(cell, namespace=names)
        session.call(forget)
        (left,) = session.call(look)
        assert segment not in left
