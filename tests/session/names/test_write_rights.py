"""Who may write to an array: what is shared for writing, what cannot be, and what a wrong write says."""

import linecache

import numpy as np
import pytest
from IPython.core import interactiveshell

import nbparallel
from nbparallel.engine import failures
from nbparallel.errors import (
    NotAnArrayError,
    ObjectArrayError,
    ReadOnlyArrayError,
    UnknownNameError,
)
from nbparallel.session.names.delivery import LATER


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


def test_names_of_the_same_memory_are_named(pair):
    """Sharing a view lets ranks write what it is a view of; the line says so."""
    pair.type("import numpy as np; x = np.zeros(4); other = np.zeros(4); part = x[::2]; _5 = x")
    pair.run("x, other")
    said = f"ranks may write part from now on, and x, which is the same memory{LATER}"
    assert pair.names.share(["part"], pair.notebook)[-1] == said
    pair.run("x[1] = 3")
    assert pair.notebook["x"].tolist() == [0, 3, 0, 0]
    assert pair.names.share(["x"], pair.notebook) == ()


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
def test_a_memmap_is_private_on_ranks(pair, tmp_path, suffix, mode):
    """Ranks map it copy-on-write; private pages are copied, and the line has a call that maps the file."""
    path = str(tmp_path / f"data{suffix}")
    if suffix == ".npy":
        np.save(path, np.arange(6.0).reshape(2, 3))
        pair.notebook["m"] = np.load(path, mmap_mode=mode)
    else:
        np.arange(6.0).tofile(path)
        pair.notebook["m"] = np.memmap(path, "f8", mode, shape=(2, 3))
    pair.notebook["part"] = pair.notebook["m"][1:].T
    assert pair.run("part.sum(), m.sum()") == (12.0, 15.0)
    with pytest.raises(NotAnArrayError) as caught:
        pair.names.share(["m"], pair.notebook)
    call = str(caught.value).split("`m = ")[1].split("`")[0]
    mapped = eval(call, {"nbp": nbparallel})
    assert mapped.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mapped.flags.writeable == (mode == "r+")
    if mode == "c":
        assert f"m is a numpy.memmap and was copied for the ranks: `m = {call}`" in pair.notes[0]
        assert "`part = nbp.from_file(…)`" in pair.notes[1]
    else:
        assert not pair.notes
    if mode == "r+":
        pair.run("part[0, 0] = 9; m[0, 0] = 8")
        assert pair.run("part[0, 0], m[0, 0]") == (9.0, 8.0)
        assert pair.notebook["m"].tolist() == np.memmap.tolist(mapped) == [[0, 1, 2], [3, 4, 5]]
        pair.notebook["gone"] = [np.memmap(tmp_path / "gone", "f8", "w+", shape=4)]
        (tmp_path / "gone").unlink()
        assert pair.run("gone[0].sum()") == 0.0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        ("x = 1", UnknownNameError, "no variable 'xx'; did you mean 'x'"),
        ("xx = [1]", NotAnArrayError, r"'xx' is of type list, .*`xx = np.array\(xx\)` makes an array"),
        ("xx = np.array([None])", ObjectArrayError, r"Python objects.*astype"),
        ("xx = np.ma.zeros(3)", NotAnArrayError, r"MaskedArray, .*only arrays inside of it can be shared"),
        (
            "xx = np.zeros(3).view(type('Sub', (np.ndarray,), {}))",
            NotAnArrayError,
            r"`xx = np.array\(xx\)` makes an array",
        ),
        (
            "import pandas; xx = pandas.DataFrame([1])",
            NotAnArrayError,
            r"`xx = np.array\(xx\)` makes an array",
        ),
        ("xx = {'a': np.zeros(3)}", NotAnArrayError, "only arrays inside of it can be shared"),
        ("xx = np", NotAnArrayError, "only arrays inside of it can be shared"),
        ("xx = np.zeros(3); xx.flags.writeable = False", ReadOnlyArrayError, "xx.flags.writeable = True"),
        (
            "xx = np.frombuffer(b'12345678')",
            ReadOnlyArrayError,
            r"for reading only.*: `xx = xx.copy.*nbp.from_file",
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
        "x[0] = y.sum()",
        "x[1:3] = y[:2]",
        "x[0] += y[0]",
        "x += y",
        "np.add(y, y, out=x)",
        "np.add(\n    y,\n    y,\n    x,\n)",
        "np.copyto(x, y)",
        "memoryview(x)[0] = 1.0",
        "import struct; struct.pack_into('d', x, 0, 3.0)",
        "import io; io.BytesIO(b'12345678').readinto(x)",
        "import ctypes; (ctypes.c_char * 8).from_buffer(x)",
        "import socket; a, b = socket.socketpair()\nwith a, b:\n    a.send(b'12345678')\n    b.recv_into(x)",
        "def fill(a): raise CVError('failed\\n> - a marked as output, but NumPy array marked as readonly')\n"
        "fill(x)",
        "def fill(a): raise TypingError('Failed\\n >>> setitem(readonly array(float64, 1d, C), int, int)')\n"
        "fill(x)",
    ],
)
def test_write_to_read_only_names_the_variable(pair, cell, monkeypatch):
    """Whatever way a cell writes to the notebook's array, the error names it and the ways out."""
    pair.type("import numpy as np; x = np.arange(4.); y = np.arange(4.); a = x[1:]; z = x")
    pair.run("a, x, y, z, np")
    pair.rank.update({name: type(name, (Exception,), {}) for name in ("CVError", "TypingError")})
    monkeypatch.setitem(linecache.cache, "<cell>", (len(cell), None, cell.splitlines(True), "<cell>"))
    try:
        exec(compile(cell, "<cell>", "exec"), pair.rank)
    except (ValueError, TypeError, pair.rank["CVError"], pair.rank["TypingError"]) as error:
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
