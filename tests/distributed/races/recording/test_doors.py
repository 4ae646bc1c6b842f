"""Doors are open while a cell is checked, and closed whatever happens."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.races.checked_cell import CONVERTING, COPIES, EXPOSING, ITERATING, TENSORS
from nbparallel.distributed.races.traced_array import TracedArray, recorder, trace
from tests.distributed.races.recording.recorded_memory import POSSIBLE, READ, WRITE, Memory, touched_by

ALL = READ | WRITE | POSSIBLE


def _state() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    found = {name: getattr(np, name) for name in (*CONVERTING, *EXPOSING, *ITERATING)}
    found |= {f"torch.{name}": getattr(torch, name) for name in (*TENSORS, *COPIES) if torch is not None}
    return found | {"vectorize": np.vectorize.__call__}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_everything_is_put_back(error: type[BaseException] | None) -> None:
    """Functions of numpy and torch, and names of the cell, are the same afterwards, whatever was raised."""
    pytest.importorskip("torch")
    before, memory = _state(), Memory(np.zeros(4))
    names: dict[str, Any] = {"make": np.asarray, "other": 3}
    try:
        with memory.checked(names):
            assert names["make"] is np.asarray is not before["asarray"]
            if error is not None:
                raise error
    except BaseException as raised:  # noqa: BLE001  what the cell raised
        assert type(raised) is error  # noqa: PT017  or nothing was raised
    assert {name: value for name, value in _state().items() if value is not before[name]} == {}
    assert names == {"make": np.asarray, "other": 3}
    assert recorder() is None


def test_what_the_cell_itself_replaced_stays() -> None:
    """A function that the user's code puts into numpy is not lost."""
    original, memory = np.asarray, Memory(np.zeros(4))

    def mine(*args: Any) -> Any:
        return original(*args)

    try:
        with memory.checked():
            np.asarray = mine  # type: ignore[assignment]
        assert np.asarray is mine
    finally:
        np.asarray = original


def test_modules_that_the_cell_imports_keep_no_door(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from numpy import asarray` in a module that a checked cell imports first is numpy's own afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_late.py").write_text(
        "from numpy import asarray, nditer\nfrom numpy import array as a\n"
    )
    original = np.asarray, np.nditer, np.array
    try:
        with Memory(np.zeros(4)).checked():
            module: Any = importlib.import_module("imported_late")
            assert module.asarray is np.asarray is not original[0]
        assert (module.asarray, module.nditer, module.a) == original
    finally:
        sys.modules.pop("imported_late", None)


def test_an_iterator_writes_only_if_it_says_so() -> None:
    """`numpy.nditer` reads unless its flags name more: ranks that iterate over one array do not race."""
    x, all_bytes = np.arange(2.0), set(range(16))
    assert touched_by(x, lambda t: [float(a) for a in np.nditer(t)]) == {READ: all_bytes}
    assert touched_by(x, lambda t: np.nditer(t, ["multi_index"], ["readonly"])) == {READ: all_bytes}
    for flags in ("readwrite", "writeonly"):
        assert touched_by(x, lambda t, flag=flags: np.nditer(t, op_flags=[flag])) == {ALL: all_bytes}
        assert touched_by(x, lambda t, flag=flags: np.nditer(t, [], [[flag]])) == {ALL: all_bytes}


def test_torch_may_write_what_it_gets_until_the_cell_ends() -> None:
    """`from_numpy` gives the memory away: in each interval from then on it may be touched."""
    torch = pytest.importorskip("torch")
    x = np.zeros(4)
    memory = Memory(x)
    with memory.checked():
        memory.recorder.next_interval()
        torch.from_numpy(trace(x)[1:3])
        memory.recorder.next_interval()
        memory.recorder.next_interval()
    accesses = memory.recorder.take()[0]
    assert [(one.interval, one.kind) for one in accesses] == [(number, ALL) for number in (1, 2, 3)]
    assert {one.site.door for one in accesses} == {"torch.from_numpy"}
    assert touched_by(x, lambda t: torch.tensor(t)) == {READ: set(range(32))}


def test_libraries_get_plain_arrays_and_read_them() -> None:
    """A library's `asarray` is a read of the whole view; the cell's own is traced, and none."""
    x, seen = np.arange(4.0), []
    library: dict[str, Any] = {"np": np, "__name__": "library"}
    exec(compile("def convert(x): return np.asarray(x)", "<library>", "exec"), library)
    assert touched_by(x, lambda t: seen.append(library["convert"](t[:2]))) == {READ: set(range(16))}
    assert touched_by(x, lambda t: seen.append(np.asarray(t))) == {}
    assert [type(one) for one in seen] == [np.ndarray, TracedArray]


@pytest.mark.slow
def test_libraries_work_with_traced_arrays() -> None:
    """Masked arrays, matplotlib, scipy, scikit-learn: they compute what they do with plain ones."""
    plt = pytest.importorskip("matplotlib.figure")
    linear = pytest.importorskip("sklearn.linear_model")
    pandas = sys.modules.get("pandas")
    x = np.random.default_rng(0).random((20, 4))
    plain_fit = linear.LinearRegression().fit(x[:, :3], x[:, 3]).coef_

    def use(t: Any) -> None:
        axes = plt.Figure().subplots()
        axes.plot(t[:, 0], t[:, 1])
        axes.imshow(t)
        assert np.allclose(linear.LinearRegression().fit(t[:, :3], t[:, 3]).coef_, plain_fit)
        if pandas is not None:
            assert pandas.DataFrame(t).shape == (20, 4)

    assert touched_by(x, use) == {READ: set(range(x.nbytes))}
