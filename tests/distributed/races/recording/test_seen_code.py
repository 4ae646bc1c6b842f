"""Accesses that numpy makes without asking the array are seen in the cell's own code."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.races.checked_cell import SeenCode
from nbparallel.distributed.races.traced_array import TracedArray, trace
from tests.distributed.races.recording.recorded_memory import POSSIBLE, READ, WRITE, Memory, bytes_where

CODE: dict[str, tuple[str, Any, Any]] = {
    # what runs, with shared `s`, 4 x 6, and private `p`, alike; what is read of `s`, and written
    "copied": ("p[1:3] = s[1:3]", np.s_[1:3], None),
    "copied of attribute": ("o.p[:] = s[::2, :]", None, None),
    "copied to many": ("p[0], p[1] = s[2], s[3]", np.s_[2:], None),
    "of a part": ("l[0] = p; l[0][2][:] = s[1]; p[i][:] = s[2]; p[i[0]][:] = s[3]", np.s_[1:], None),
    "nested": ("p[0:2] = [s[0], s[1]]", np.s_[:2], None),
    "chained": ("p[0] = p[1] = s[1]", np.s_[1], None),
    "to a shared one": ("s[0] = s[1]", np.s_[1], np.s_[0]),
    "kept, not read": ("d['a'] = s[1]; l[0] = s; k = d['a']", None, None),
    "name": ("k = s[1]; m, p[0] = s[2], 3", None, None),
    "index": ("k = p[0][i]", None, None),
    "dot": ("p[:, :4].dot(s)", np.s_[...], None),
    "dot into": ("p[:, :4].dot(np.ones((4, 6)), out=s)", None, np.s_[...]),
    "take": ("p.take(s[0, :2].astype(int))", np.s_[0, :2], None),
    "searched": ("np.arange(9.0).searchsorted(s[1])", np.s_[1], None),
    "shuffled": ("np.random.default_rng(1).shuffle(s[1])", np.s_[1], np.s_[1]),
    "drawn": ("np.random.default_rng(1).random(out=s[1])", None, np.s_[1]),
    "permuted": ("k = np.random.default_rng(1).permutation(s[1])", np.s_[1], None),
    "in a function": ("def f(a):\n    p[1] = a\nf(s[2])", np.s_[2], None),
    "own class": ("b.take(s[1])", None, None),
}


class Basket:
    """Has a method of the same name as an array."""

    def take(self, x: Any) -> None:
        """Get a traced array, as any function of the user's."""
        assert type(x) is TracedArray


def _run(code: str, x: Any) -> dict[int, set[int]]:
    memory = Memory(x, filename="<cell>")
    owner = type("Owner", (), {"p": np.zeros((2, 6))})()
    names = {"np": np, "s": trace(x), "p": np.zeros((4, 6)), "d": {}, "l": [0], "b": Basket(), "o": owner}
    names.update(i=np.arange(2))
    tree = ast.fix_missing_locations(SeenCode().visit(ast.parse(code)))
    with memory.checked(names):
        exec(compile(tree, "<cell>", "exec"), names)
    return memory.touched()


@pytest.mark.parametrize("name", CODE)
def test_what_plain_arrays_do_with_traced_ones_is_seen(name: str) -> None:
    """Assigned to a private array, an index of it, an argument of its methods: read, exactly."""
    code, read, written = CODE[name]
    if name == "copied of attribute":
        read = np.s_[::2, :]
    x = np.arange(24.0).reshape(4, 6)
    expected = {}
    for kind, key in ((READ, read), (WRITE, written)):
        mask = np.zeros((4, 6), bool)
        if key is not None:
            mask[key] = True
            expected[kind] = bytes_where(x, mask)
    assert _run(code, x) == expected


def test_the_transformed_code_does_the_same_on_the_same_lines() -> None:
    """Line numbers, results and values of the last expression are those of the cell."""
    code = "a = [3, 4]\na[0], b = 5, a[1]\nx: dict[str, int] = {}\nx['k'] = a\nc = x['k'][0]\nd = 1 / 0"
    tree = ast.fix_missing_locations(SeenCode().visit(ast.parse(code)))
    names: dict[str, Any] = {}
    with pytest.raises(ZeroDivisionError) as error:
        exec(compile(tree, "<cell>", "exec"), names)
    assert error.traceback[-1].lineno == 5
    assert (names["a"], names["b"], names["c"]) == ([5, 4], 4, 5)
    assert names["x"]["k"] is names["a"]


def test_files_may_read_and_fill_what_they_get(tmp_path: Any) -> None:
    """A file that gets the memory may read or write it until the cell ends."""
    x = np.arange(4.0)
    kinds = _run("import io\nf = io.BytesIO(bytes(32))\nf.readinto(s)", x)
    assert kinds == {READ | WRITE | POSSIBLE: set(range(32))}
    assert not x.any()


def test_files_read_what_is_written_to_them() -> None:
    """Ranks that write one array to files of their own do not race."""
    assert _run("import io\nio.BytesIO().write(s)", np.arange(4.0)) == {READ: set(range(32))}


COMPILED = (
    "@njit\ndef f(a, i):\n    a[0] = a[i]",
    "@numba.njit(parallel=True)\ndef f(a, i):\n    a[0] = a[i]",
    "def f(a, i):\n    a[0] = a[i]\ng = njit(f)\nh = jit(parallel=True)(f)",
    "f = njit(lambda a, i: a[i])",
)


@pytest.mark.parametrize("code", COMPILED)
def test_functions_that_something_else_compiles_stay(code: str) -> None:
    """Numba knows nothing of the calls: it would refuse the function, and the cell would fail."""
    assert ast.dump(SeenCode().visit(ast.parse(code))) == ast.dump(ast.parse(code))
