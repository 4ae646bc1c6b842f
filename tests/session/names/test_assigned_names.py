"""What a name is on a rank: the notebook's value or the rank's own, by who assigned it last."""

import pytest
from hypothesis import given, settings, strategies as st

from nbparallel.errors import (
    UnpicklableError,
)
from tests.harness.tiers import examples
from tests.session.names.pair import Pair


def test_rank_keeps_what_it_assigned(pair):
    """A rank's own value stays until the notebook changes the name; then one line says it was replaced."""
    pair.type("x = 1; l = [1]")
    pair.run("x, l")
    pair.run("x = rank * 10\nl = 'mine'")
    assert pair.run("x, l") == (30, "mine")
    pair.type("x = 2; l.append(2)")
    assert pair.run("x, l") == (2, [1, 2])
    assert len(pair.notes) == 2
    assert pair.notes[0].endswith("was replaced: the notebook has changed it since this rank assigned it")
    pair.type("x = 3")
    assert pair.run("x") == 3
    assert pair.notes == ()


def test_rank_keeps_a_name_it_never_got(pair):
    """A cell that assigns a name without reading it keeps its own, though the notebook has one too."""
    pair.type("import numpy as np; x = 5; l = [1]; a = np.zeros(3); v = a[1:]")
    pair.run("x = rank\nl = 'mine'\na = 'mine'")
    assert pair.sent() == []
    pair.run("v")  # moves a too, which is no change
    assert pair.run("x, l, a") == (3, "mine", "mine")
    assert pair.notes == ()
    pair.type("x = 6; l = [2]; a = a.copy()")
    assert pair.run("x, l, len(a)") == (6, [2], 3)
    assert len(pair.notes) == 3


def test_rank_that_did_not_come_to_assign_gets_the_notebooks(pair):
    """Where the cell failed before its assignment, the notebook's value is there."""
    pair.type("x = 1")
    with pytest.raises(ZeroDivisionError):
        pair.run("1 / 0\nx = 'mine'\n0")
    assert pair.run("x") == 1


def test_deleted_names_disappear(pair):
    """A name deleted in the notebook disappears from a rank, unless the rank has assigned it."""
    pair.type("import math\nx = [1]; y = [2]\ndef f(): return helper()\ndef helper(): return 1")
    pair.run("x, y, math, f()")
    pair.run("y = ['mine']")
    pair.type("del x, y, math, helper")
    pair.run("1")
    assert not {"x", "math", "helper"} & pair.rank.keys()
    assert pair.rank["y"] == ["mine"]
    pair.type("y = 'back'")
    assert pair.run("y") == "back"


def test_another_namespace_is_no_deletion(pair):
    """Cells that bring their own namespace do not delete each other's names."""
    pair.notebook = {"x": [1]}
    pair.run("x")
    pair.notebook = {"y": [2]}
    assert pair.run("x, y") == ([1], [2])


def test_predefined_names_are_only_defaults(pair):
    """A notebook's own `rng` wins on the rank; when it is deleted the predefined one comes back."""
    assert pair.run("rng, rank") == ("the rank's", 3)
    pair.type("rng = [1]; rank = 77")
    assert pair.run("rng, rank") == ([1], 77)
    pair.type("del rng, rank")
    assert pair.run("rng, rank") == ("the rank's", 3)


def test_importing_the_package_in_the_notebook_does_no_harm(pair):
    """`import nbparallel as nbp` and `from … import` in the notebook give the rank its own."""
    pair.type(
        "import nbparallel as nbp, nbparallel.distributed as dist\n"
        "from nbparallel.errors import DeadlockError"
    )
    assert pair.run("nbp.__name__, dist.__name__, DeadlockError.__name__") == (
        "nbparallel",
        "nbparallel.distributed",
        "DeadlockError",
    )


def test_apply_is_all_or_nothing(pair):
    """If one value cannot be rebuilt, no name changes, and the error names the variable."""
    pair.type("x = 1")
    pair.run("x")
    pair.type("x = 2\nclass Late:\n    def __reduce__(self): return (exec, ('1/0',))\nzz = Late()")
    updates = pair.prepare("x, zz")
    with (
        pytest.raises(UnpicklableError, match="variable 'zz' could not be rebuilt") as caught,
        pair.on_rank(),
    ):
        pair.rank_names.apply(updates)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert pair.rank["x"] == 1
    assert "zz" not in pair.rank


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["type", "rank", "read", "delete"]), st.sampled_from("xy")),
        max_size=12,
    )
)
def test_the_last_assignment_wins(steps):
    """In any order of assignments, reads and deletions a rank sees the last assignment of either side.

    Each assigns another value: an equal one is no change, and a rank keeps what it has.
    """
    pair = Pair()
    expected = {}
    try:
        for number, (what, name) in enumerate(steps):
            if what == "type":
                pair.notebook[name] = ["notebook", number]
                expected[name] = ["notebook", number]
            elif what == "rank":
                pair.run(f"{name} = ['rank', {number}]")
                expected[name] = ["rank", number]
            elif what == "delete":
                pair.notebook.pop(name, None)
            elif name in expected and (name in pair.notebook or expected[name][0] == "rank"):
                assert pair.run(name) == expected[name]
    finally:
        pair.close()
