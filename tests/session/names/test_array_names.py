"""Arrays by name: ranks see the notebook's memory, whatever their form, and nothing is sent twice."""

import numpy as np
import pytest


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


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # NumPy 2.5; users still do
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
