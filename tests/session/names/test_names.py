"""Names: each rule of how the notebook's names reach a rank."""

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core import interactiveshell

import nbparallel
from nbparallel.engine import failures
from nbparallel.errors import (
    NotAnArrayError,
    ObjectArrayError,
    ReadOnlyArrayError,
    UnknownNameError,
    UnpicklableError,
)
from nbparallel.session.names.delivery import LATER
from nbparallel.testing.tiers import examples
from nbparallel.wire.name_updates import NameKind, NameUpdate
from tests.session.names.pair import Pair


@pytest.fixture
def pair():
    """Return a notebook and a rank."""
    pair = Pair()
    with pair.on_rank():
        pass
    yield pair
    pair.close()


# arrays ---------------------------------------------------------------------------------------------------


def test_array_is_the_same_memory(pair):
    """The rank sees the notebook's array without a copy, read-only; a later cell sends nothing."""
    pair.type("import numpy as np; x = np.arange(10.)")
    assert pair.run("x.sum()") == 45
    assert pair.preparation.copied_nbytes == {"x": 80}
    pair.notebook["x"][0] = 100
    assert pair.run("x[0]") == 100
    assert pair.sent() == []
    assert pair.preparation.copied_nbytes == {}
    assert pair.preparation.shared_nbytes == {"x": 80}
    assert not pair.rank["x"].flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        pair.rank["x"].flags.writeable = True


def test_names_of_one_memory_move_together(pair):
    """Aliases stay one object and views stay views, in the notebook and on the rank."""
    pair.type("import numpy as np; x = np.arange(24.).reshape(4, 6); alias = x; v = x[::-2, 1:5:2]; w = v.T")
    before = {
        name: (a.shape, a.strides, a.copy()) for name, a in pair.notebook.items() if type(a) is np.ndarray
    }
    assert pair.run("v.sum()") is not None
    ns = pair.notebook
    assert ns["alias"] is ns["x"]
    for name, (shape, strides, content) in before.items():
        assert (ns[name].shape, ns[name].strides) == (shape, strides)
        np.testing.assert_array_equal(ns[name], content)
    ns["x"][3, 1] = -1
    assert ns["v"][0, 0] == ns["w"][0, 0] == -1
    assert pair.run("x is alias and np.shares_memory(v, x) and v[0, 0]", ()) == -1
    assert pair.preparation.copied_nbytes.keys() <= {"np"}
    assert pair.notes == ()


@pytest.mark.parametrize(
    "make",
    [
        "np.array(3.5)",
        "np.zeros((0, 5))",
        "np.zeros(7)[3:3]",
        "np.asfortranarray(np.arange(12).reshape(3, 4))",
        "np.arange(10)[::-3]",
        "np.arange(60).reshape(3, 4, 5).transpose(1, 2, 0)",
        "np.zeros(3, dtype=[('a', '<i2'), ('b', '>f8', (2,))])",
        "np.broadcast_to(np.arange(3), (1000, 3))",
        "np.lib.stride_tricks.sliding_window_view(np.arange(10), 3)",
        "np.array(['a', 'bcd'])",
        "np.array(['2020-01-01'], 'M8[D]')",
        "np.arange(5, dtype='>u4')",
        "np.ones((4, 4), dtype=bool)[1:3, ::2]",
    ],
)
def test_arrays_of_any_form(pair, make):
    """0-d, empty, of any order, strides and dtype: an array arrives as what it is, copied once."""
    pair.type(f"import numpy as np; x = {make}")
    before = pair.notebook["x"]
    form, content = (before.shape, before.strides, before.dtype, before.flags.writeable), before.copy()
    del before
    got = pair.run("x")
    for x in (got, pair.notebook["x"]):
        assert (x.shape, x.strides, x.dtype) == form[:3]
        np.testing.assert_array_equal(x, content)
    assert pair.notebook["x"].flags.writeable == form[3]
    assert not got.flags.writeable
    assert type(got) is np.ndarray
    pair.run("x")
    assert pair.sent() == []


def test_read_only_flag_is_kept(pair):
    """An array flagged read-only in the notebook stays so there; views keep their own flags."""
    pair.type("import numpy as np; x = np.arange(4.); r = x[:2]; r.flags.writeable = False")
    pair.run("r")
    assert pair.notebook["x"].flags.writeable
    assert not pair.notebook["r"].flags.writeable


def test_other_holders_are_told(pair):
    """One line says if a list or an attribute still holds the old memory; garbage does not count."""
    pair.type("import numpy as np; x = np.arange(1000.); held = [x[2:]]; y = np.arange(5.)")
    pair.type("ring = [y]; ring.append(ring); del ring")
    pair.run("x, y")
    assert len(pair.notes) == 1
    assert pair.notes[0].startswith("x was copied into shared memory, and a list, an attribute")
    assert "7.8 KiB" in pair.notes[0]


def test_ipythons_history_moves_along(pair):
    """A result that IPython keeps in Out and _5 is bound to the shared memory too."""
    pair.type("import numpy as np; x = np.arange(3.); Out = {5: x}; _5 = x; _ = x")
    pair.run("x")
    ns = pair.notebook
    assert ns["Out"][5] is ns["_5"] is ns["_"] is ns["x"]
    assert pair.notes == ()
    assert pair.sent() == ["x"]


def test_memory_of_others_is_copied_and_told(pair):
    """An array in a buffer that numpy does not own gets a shared copy of its own, and one line says so."""
    pair.type("import numpy as np; b = bytearray(80); x = np.frombuffer(b); v = x[2:4]")
    pair.run("x, v")
    assert pair.notes[0].startswith("v, x showed the content of a bytearray, and have a copy of it")
    pair.notebook["x"][2] = 7
    assert pair.run("x[2], v[0]") == (7, 7)
    assert bytes(pair.notebook["b"]) == bytes(80)


def test_memory_that_never_changes_is_copied_without_a_line(pair):
    """A bytes object is what it is: its copy cannot differ."""
    pair.type("import numpy as np; x = np.frombuffer(bytes(80))")
    assert pair.run("x.sum()") == 0
    assert pair.notes == ()


def test_rebinding_sends_again(pair):
    """Other memory or another part is a change; equal content in other memory too."""
    pair.type("import numpy as np; x = np.arange(4.)")
    pair.run("x")
    for change in (
        "x = x[1:]",
        "x = x.reshape(3, 1)",
        "x = x.copy()",
        "x.shape = (1, 3)",
        "x = x.view('i8')",
    ):
        pair.type(change)
        got = pair.run("x")
        assert pair.sent() == ["x"], change
        np.testing.assert_array_equal(got, pair.notebook["x"])


def test_object_arrays_and_subclasses_are_copied(pair):
    """Arrays of objects and subclasses of ndarray travel as other objects do."""
    pair.type("import numpy as np; o = np.array([1, 'a'], object); m = np.ma.array([1, 2], mask=[0, 1])")
    o, m = pair.run("o, m")
    assert list(o) == [1, "a"]
    assert type(m) is np.ma.MaskedArray
    assert type(pair.notebook["m"]) is np.ma.MaskedArray
    assert pair.preparation.shared_nbytes == {}


def test_shared_arrays_inside_objects(pair):
    """A list that holds a shared array holds the same memory on the rank."""
    pair.type("import numpy as np; x = np.arange(4.)")
    pair.run("x")
    pair.type("box = [x, x[1:]]")
    assert pair.run("np.shares_memory(box[0], x) and np.shares_memory(box[1], x)")
    pair.type("box[0][0] = 5")
    pair.run("box")
    assert pair.sent() == []


# rights ---------------------------------------------------------------------------------------------------


def test_share_lets_ranks_write(pair):
    """`%share` (and `--share`) makes an array writable for ranks, whether or not they have it already."""
    pair.type("import numpy as np; x = np.zeros(3); y = np.zeros(3)")
    pair.run("x")
    assert pair.names.share(["x"], pair.notebook)[-1] == "ranks may write x from now on" + LATER
    assert pair.names.share(["x"], pair.notebook) == ()
    pair.run("x[0] = 1")
    pair.run("y[1] = 2", share=["y", "x", "y"])
    assert pair.notes == ("ranks may write y from now on" + LATER,)
    assert pair.notebook["x"].tolist() == [1, 0, 0]
    assert pair.notebook["y"].tolist() == [0, 2, 0]
    pair.run("y[2] = 3")
    assert pair.sent() == []


def test_rights_do_not_replace_what_the_rank_assigned(pair):
    """Sharing is no change of value: a rank's own variable of that name stays."""
    pair.type("import numpy as np; x = np.zeros(3)")
    pair.run("x")
    pair.run("x = 'mine'")
    pair.names.share(["x"], pair.notebook)
    assert pair.run("x") == "mine"
    assert pair.notes == ()


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_memmap_points_to_from_file(pair, tmp_path, suffix, mode):
    """Used in a cell, or named to be shared: the line has a call that maps the file itself, and works."""
    path = str(tmp_path / f"data{suffix}")
    if suffix == ".npy":
        np.save(path, np.arange(6.0).reshape(2, 3))
        pair.notebook["m"] = np.load(path, mmap_mode=mode)
    else:
        np.arange(6.0).tofile(path)
        pair.notebook["m"] = np.memmap(path, "f8", mode, shape=(2, 3))
    assert pair.run("m.sum()") == 15.0
    (note,) = pair.notes
    with pytest.raises(NotAnArrayError) as caught:
        pair.names.share(["m"], pair.notebook)
    call = str(caught.value).split("`m = ")[1].split("`")[0]
    assert f"m is a numpy.memmap and was copied for the ranks: `m = {call}`" in note
    mapped = eval(call, {"nbp": nbparallel})
    assert mapped.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mapped.flags.writeable == (mode == "r+")
    pair.notebook["part"] = pair.notebook["m"][1:]
    assert pair.run("part.sum()") == 12.0
    assert "`part = nbp.from_file(…)`" in pair.notes[0]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        ("x = 1", UnknownNameError, "no variable 'xx'; did you mean 'x'"),
        ("xx = [1]", NotAnArrayError, r"'xx' is of type list, .*`xx = np.array\(xx\)` makes an array"),
        ("xx = np.array([None])", ObjectArrayError, r"Python objects.*astype"),
        ("xx = np.ma.zeros(3)", NotAnArrayError, "MaskedArray"),
        ("xx = np.zeros(3); xx.flags.writeable = False", ReadOnlyArrayError, "xx.flags.writeable = True"),
        (
            "xx = np.frombuffer(b'12345678')",
            ReadOnlyArrayError,
            r"for reading only.*: nbp.from_file.*or `xx =",
        ),
    ],
)
def test_bad_names_to_share(pair, make, error, text):
    """What cannot be shared says why and what to do, before anything is moved."""
    pair.type("import numpy as np; good = np.zeros(3); " + make)
    good = pair.notebook["good"]
    with pytest.raises(error, match=text):
        pair.prepare("1", share=["good", "xx"])
    assert pair.notebook["good"] is good


def test_a_suggestion_is_a_name_of_the_user(pair):
    """IPython's own `open`, which is in the notebook's namespace, is not suggested."""
    pair.notebook["open"] = interactiveshell._modified_open
    with pytest.raises(UnknownNameError, match=r"the notebook has no variable 'ope'$"):
        pair.prepare("1", share=["ope"])


# objects --------------------------------------------------------------------------------------------------


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
    pair.type("bad = threading.Lock()")
    with pytest.raises(UnpicklableError, match="variable 'bad' cannot be sent"):
        pair.prepare("bad + 1")


# what a rank keeps ----------------------------------------------------------------------------------------


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


def test_rank_keeps_what_it_assigned_after_the_notebook(pair):
    """The later assignment wins, also when the notebook's was never delivered."""
    pair.type("x = 1")
    pair.run("x")
    pair.type("x = 2")
    pair.run("x = 'mine'")
    assert pair.run("x") == "mine"
    pair.type("x = 3")
    assert pair.run("x") == 3


def test_rank_that_did_not_come_to_assign_gets_the_notebooks(pair):
    """Where the cell failed before its assignment, the notebook's value is there."""
    pair.type("x = 1")
    with pytest.raises(ZeroDivisionError):
        pair.run("1 / 0\nx = 'mine'\n0")
    assert pair.run("x") == 1


def test_names_the_notebook_defines_later(pair):
    """A name that a rank had first is replaced when the notebook defines it."""
    pair.run("x = 'mine'")
    pair.type("x = 7")
    assert pair.run("x") == 7
    assert len(pair.notes) == 1


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


def test_undelivered_updates_come_again(pair):
    """What a rank has not confirmed is sent again; a rank that was restarted gets all again."""
    pair.type("import numpy as np; x = np.zeros(3); y = [1]")
    assert len(pair.prepare("x, y")) == 2
    assert len(pair.prepare("x, y")) == 2
    pair.names.delivered(0, pair.preparation)
    assert pair.prepare("x, y") == ()
    pair.names.rank_lost(0)
    assert len(pair.prepare("x, y")) == 2


def test_ranks_have_their_own_books(pair):
    """A cell on some ranks gives nothing to the others; their next cell does."""
    pair.type("x = [1]")
    both = pair.names.prepare("x", pair.notebook, [0, 1])
    assert both.updates[0] == both.updates[1]
    pair.names.delivered(0, both)
    again = pair.names.prepare("x", pair.notebook, [0, 1])
    assert (len(again.updates[0]), len(again.updates[1])) == (0, 1)


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


# functions, classes, modules ------------------------------------------------------------------------------


def test_functions_bring_what_they_use(pair):
    """The names that functions use come along, transitively, and are looked up on the rank."""
    pair.type("k = 5\ndef f(n): return g(n) + k\ndef g(n): return 1 if n == 0 else n * g(n - 1) * rank")
    assert pair.run("f(1)") == 8
    assert set(pair.sent()) == {"f", "g", "k"}
    pair.type("k = 6")
    assert pair.run("f(1)") == 9
    assert pair.sent() == ["k"]
    pair.type("def g(n): return 0")
    assert pair.run("f(1)") == 6
    assert pair.run("k = 100\nf(1)") == 100


def test_instances_belong_to_the_ranks_class(pair):
    """Instances, early and late, are instances of the rank's one class, whose methods see the rank."""
    pair.type(
        "off = 1\nclass A:\n    n = 0\n    def f(self): return rank + off\nclass B(A): pass\na = A(); b = B()"
    )
    assert pair.run("a.f(), type(a).__name__") == (4, "A")
    pair.rank["first"] = pair.rank["a"]
    assert pair.run("type(first) is A and type(b) is B and isinstance(b, A) and b.f()") == 4
    pair.type("a = A(); a.extra = B")
    assert pair.run("type(a) is A is type(first) and a.extra is B")
    assert pair.sent() == ["a"]


def test_class_is_not_reset_by_its_instances(pair):
    """What a rank changed in a class stays when an instance comes; a change in the notebook replaces it."""
    pair.type("class A: n = 0\na = A()")
    pair.run("A.n = 50\na")
    pair.type("a = A()")
    assert pair.run("a.n") == 50
    pair.type("A.n = 7")
    assert pair.run("a.n") == 7
    pair.type("class A: n = 8")
    assert pair.run("A.n, a.n") == (8, 7)


def test_class_and_function_are_sent_once(pair):
    """Unchanged definitions do not travel again, also after an instance was pickled and used."""
    pair.type("class A:\n    x: int = 1\n    def f(self): return g()\ndef g(): return 2\na = A()")
    pair.run("a.f(), A.f, g")
    pair.type("a.f(); A.__annotations__; import copy; copy.copy(a)")
    pair.run("a.f(), A.f, g")
    assert pair.sent() == []


def test_class_outlives_its_instances(pair):
    """An instance that comes after all others have died still finds its class."""
    pair.type("class A: pass\na = A()")
    pair.run("a")
    pair.run("a = None")
    gc.collect()
    pair.type("b = A()")
    assert pair.run("type(b).__name__") == "A"


def test_modules_come_by_name(pair):
    """Modules, and the submodules that the cell mentions, are imported; nothing travels twice."""
    pair.type("import os.path as p, xml, xml.dom.minidom, json")
    assert pair.run("p.join('a', 'b'), json.dumps(1), xml.dom.minidom.Node.__name__") == ("a/b", "1", "Node")
    update = next(u for u in pair.preparation.updates[0] if u.name == "xml")
    assert update.modules == ("xml", "xml.dom", "xml.dom.minidom")
    pair.run("xml, json")
    assert pair.sent() == []


def test_module_that_cannot_be_imported(pair):
    """A module that the rank does not have is one clear error with the variable and the module."""
    update = NameUpdate("m", NameKind.MODULE, modules=("no_such_module",))
    with pytest.raises(UnpicklableError, match=r"'m' is the module 'no_such_module'.*ModuleNotFoundError"):
        pair.rank_names.apply([update])


# a write to a read-only array -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        "x[0] = 1",
        "x += 1",
        "np.add(x, 1, out=x)",
        "v = x[1:]\nv[0] = 2",
        "def f(a):\n    a[0] = 1\nf(x[2:])",
        "x.sort()",
        "x.flags.writeable = True",
        "np.put(x, 0, 1)",
        "for row in x.reshape(2, 2):\n    row[:] = 0",
        "x.fill(2)",
    ],
)
def test_write_to_read_only_names_the_variable(pair, cell):
    """Whatever way a cell writes to the notebook's array, the error names it and the ways out."""
    pair.type("import numpy as np; x = np.arange(4.); y = np.arange(4.); a = x[1:]; z = x")
    pair.run("a, x, y, z, np")
    try:
        exec(compile(cell, "<cell>", "exec"), pair.rank)
    except ValueError as error:
        better, in_a_script = (
            failures.explain_read_only(error, pair.rank_names, error.__traceback__, magics=magics)
            for magics in (True, False)
        )
    assert isinstance(better, ReadOnlyArrayError)
    for text in ("'x'", "--share x", "%share x", "x = x.copy()"):
        assert text in str(better)
    assert "share it" not in str(in_a_script)
    assert "%share" not in str(in_a_script)
    assert "--share" not in str(in_a_script)
    for text in ("'x'", "`x = nbp.share(x)`", "x = x.copy()"):
        assert text in str(in_a_script)


@pytest.mark.parametrize("cell", ["int('read-only')", "mine[0] = 1", "1 / 0"])
def test_other_errors_are_left_alone(pair, cell):
    """An error that has nothing to do with the notebook's arrays is not explained away."""
    pair.type("import numpy as np; x = np.arange(4.)")
    pair.run("x, np\nmine = np.zeros(3)\nmine.flags.writeable = False")
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        exec(compile(cell, "<cell>", "exec"), pair.rank)
    assert failures.explain_read_only(caught.value, pair.rank_names, caught.tb, magics=True) is None


# cost and properties --------------------------------------------------------------------------------------


def test_unchanged_arrays_cost_little(pair):
    """Preparing a cell whose 20 arrays did not change takes well under 200 µs."""
    pair.type("import numpy as np")
    for index in range(20):
        pair.notebook[f"x{index}"] = np.zeros(index)
    cell = ", ".join(f"x{index}" for index in range(20))
    pair.run(cell)
    best = 1.0
    for _ in range(50):
        begin = time.perf_counter()
        assert pair.prepare(cell) == ()
        best = min(best, time.perf_counter() - begin)
    assert best < 200e-6


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


def test_two_threads_prepare(pair):
    """Two cells prepared at once, on different ranks, move an array once."""
    pair.type("import numpy as np; x = np.zeros(1000); v = x[1:]")
    got = {}
    threads = [
        threading.Thread(target=lambda r=r: got.update({r: pair.names.prepare("x, v", pair.notebook, [r])}))
        for r in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    segments = {update.handle.segment for p in got.values() for u in p.updates.values() for update in u}
    assert len(segments) == 1
    assert np.shares_memory(pair.notebook["x"], pair.notebook["v"])
