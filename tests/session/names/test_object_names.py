"""Objects by name, which are copied: changes are sent again, and what cannot travel is named."""

import pytest

from nbparallel.errors import (
    UnpicklableError,
)


def test_mutation_is_noticed(pair):
    """A list, a dict, a large buffer: changed content is sent again, unchanged is not."""
    pair.type("import numpy as np; l = [1]; d = {'a': l}; big = {'m': np.ma.zeros(100_000)}")
    pair.run("l, d, big")
    pair.run("l, d, big")
    assert pair.sent() == []
    pair.type("l.append(2); big['m'][77_777] = 1")
    assert pair.run("l, d['a'], big['m'][77_777]") == ([1, 2], [1, 2], 1)
    assert sorted(pair.sent()) == ["big", "d", "l"]


def test_large_buffers_are_the_ranks_own(pair):
    """A rank may write to its copy of a large buffer; the notebook and the next delivery do not see it."""
    pair.type("import numpy as np; big = [np.ma.zeros(100_000)]")
    pair.run("big[0][:] = 5")
    assert pair.notebook["big"][0].sum() == 0
    pair.run("big")
    assert pair.sent() == []
    assert pair.rank["big"][0].sum() == 500_000


@pytest.mark.parametrize(
    "value", [1, True, 1.5, float("nan"), -0.0, 2**100, "a", b"b", None, 1j, ..., range(3)]
)
def test_small_values_are_not_sent_twice(pair, value):
    """Numbers, strings and the like travel once."""
    pair.notebook["n"] = value
    pair.run("n")
    pair.run("n")
    assert pair.sent() == []


@pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0.0, -0.0), ("a", b"a"), (0, None)])
def test_equal_is_not_the_same(pair, before, after):
    """1 and True are different values."""
    pair.notebook["n"] = before
    pair.run("n")
    pair.notebook["n"] = after
    assert repr(pair.run("n")) == repr(after)


def test_unpicklable_is_said_before_anything_runs(pair):
    """One clear line names the variable; the rank has got nothing, and the next cell is not hurt."""
    pair.type("import threading; good = 1; bad = {'lock': threading.Lock()}\ndef f(): return bad")
    with pytest.raises(UnpicklableError, match=r"variable 'bad' cannot be sent.*bad\['lock'\].*_thread.lock"):
        pair.prepare("good, bad")
    with pytest.raises(UnpicklableError, match=r"the cell uses it through f"):
        pair.prepare("f()")
    assert pair.run("good") == 1


def test_doubtful_names_that_cannot_travel_are_only_told(pair):
    """A name that the cell assigns itself, or that a magic mentions, does not stop it."""
    pair.type("import threading; bad = threading.Lock()")
    assert pair.run("if rank:\n    bad = 1\nbad") == 1
    assert "bad is not on the ranks" in pair.notes[0]
    assert pair.run("bad = 2\nbad") == 2
    assert pair.notes == ()


def test_what_a_rank_assigned_is_used_although_the_notebooks_cannot_travel(pair):
    """Its own value, with a line, until the notebook binds the name to something else."""
    pair.type("import threading; bad = threading.Lock()")
    pair.run("bad = 2")
    assert pair.run("bad + 1") == 3
    assert pair.notes[0].startswith("bad is only on ranks that assigned it: variable 'bad' cannot be sent")
    assert pair.run("if bad > 5:\n    bad = 1\nbad") == 2
    assert pair.notes[0].startswith("bad is only on ranks that assigned it")
    pair.type("bad = threading.Lock()")
    with pytest.raises(UnpicklableError, match="variable 'bad' cannot be sent"):
        pair.prepare("bad + 1")
