"""Recorded bytes are those that numpy touches: compared with masks to which numpy does the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as nps

from tests.distributed.races.recording.recorded_memory import READ, WRITE, bytes_where, touched_by

DTYPES = st.sampled_from(["u1", "<i2", "<f4", "<f8", "<c16", "S3", "M8[s]"])
SHAPES = nps.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=6)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _indices(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Return indices of every sort: slices with steps, newaxis, ellipsis, fancy ones, masks."""
    basic = nps.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True)
    if not shape:
        return basic
    fancy = nps.integer_array_indices(shape, result_shape=nps.array_shapes(max_dims=2, max_side=4))
    some = st.integers(1, len(shape)).flatmap(
        lambda count: nps.integer_array_indices(shape[:count], result_shape=nps.array_shapes(max_dims=2))
    )
    masks = nps.arrays(bool, shape)
    first = nps.arrays(bool, shape[:1])
    lists = st.lists(st.integers(-shape[0], shape[0] - 1), min_size=1, max_size=5)
    mixed = st.tuples(st.just(slice(None, None, -1)), lists) if len(shape) > 1 else lists
    if len(shape) > 1:
        mixed = st.tuples(
            st.slices(shape[0]), st.lists(st.integers(-shape[1], shape[1] - 1), min_size=1, max_size=4)
        )
    return st.one_of(basic, basic, fancy, some, masks, first, lists, mixed)


def _view(data: st.DataObject, shape: tuple[int, ...]) -> list[Any]:
    """Return up to two steps to a view: each a function."""
    steps: list[Any] = []
    for _ in range(data.draw(st.integers(0, 2))):
        probe = np.empty(shape)
        for step in steps:
            probe = step(probe)
        if not probe.ndim:
            break
        key = data.draw(nps.basic_indices(probe.shape, allow_newaxis=True, allow_ellipsis=True))
        part = probe[key]
        if isinstance(part, np.ndarray) and part.size:
            steps.append(lambda x, key=key: x[key])
        if data.draw(st.booleans()):
            steps.append(lambda x: x.T)
    return steps


def _apply(x: Any, steps: list[Any]) -> Any:
    for step in steps:
        x = step(x)
    return x


@pytest.mark.slow
@QUICK
@given(st.data())
def test_reads_of_any_index_of_any_view_are_recorded_exactly(data: st.DataObject) -> None:
    """Whatever the index, just the bytes that it takes count as read; a view reads nothing."""
    shape = data.draw(SHAPES)
    x = np.zeros(shape, data.draw(DTYPES))
    steps = _view(data, shape)
    numbers = _apply(np.arange(x.size).reshape(shape), steps)
    key = data.draw(_indices(numbers.shape))
    taken = numbers[key]
    mask = np.zeros(x.size, bool)
    is_view = isinstance(taken, np.ndarray) and (not taken.size or np.may_share_memory(taken, numbers))
    if not is_view:
        mask[np.asarray(taken).reshape(-1)] = True

    def read(traced: Any) -> None:
        found = _apply(traced, steps)[key]
        if not is_view:
            assert type(found) is not type(traced)

    expected = bytes_where(x, mask.reshape(shape))
    assert touched_by(x, read) == ({READ: expected} if expected else {})


@pytest.mark.slow
@QUICK
@given(st.data())
def test_writes_of_any_index_of_any_view_are_recorded_exactly(data: st.DataObject) -> None:
    """Whatever the index, just the bytes that are assigned count as written."""
    shape = data.draw(SHAPES)
    x = np.zeros(shape, data.draw(DTYPES))
    steps = _view(data, shape)
    view = _apply(x, steps)
    key = data.draw(_indices(view.shape))
    mask = np.zeros(shape, bool)
    _apply(mask, steps)[key] = True
    value = np.ones((), x.dtype)[()]

    def write(traced: Any) -> None:
        _apply(traced, steps)[key] = value

    expected = bytes_where(x, mask)
    assert touched_by(x, write) == ({WRITE: expected} if expected else {})
    assert (x[mask] == value).all()
    assert (x[~mask] != value).all()


@pytest.mark.slow
@QUICK
@given(st.data())
def test_masks_of_ufuncs_choose_what_is_read_and_written(data: st.DataObject) -> None:
    """With ``where=`` an input is read, and `out` written, where the mask says so."""
    shape = data.draw(SHAPES)
    x = np.zeros(shape, "<f8")
    mask = data.draw(nps.arrays(bool, data.draw(nps.broadcastable_shapes(shape, max_dims=len(shape)))))
    wide = np.zeros(np.broadcast_shapes(shape, mask.shape), bool) | mask
    if wide.shape != shape:
        return
    expected = bytes_where(x, wide)
    both = {READ: expected, WRITE: expected} if expected else {}
    assert touched_by(x, lambda t: np.add(t, 1, out=t, where=mask)) == both
    only_read = {READ: expected} if expected else {}
    assert touched_by(x, lambda t: np.add(t, np.ones(shape), out=np.zeros(shape), where=mask)) == only_read
    for reduced in (
        lambda t: np.add.reduce(t, axis=None, where=mask),
        lambda t: t.sum(where=mask),
        lambda t: np.sum(t, where=mask),
        lambda t: np.any(t, where=mask),
    ):
        assert touched_by(x, reduced) == only_read


@pytest.mark.slow
@QUICK
@given(st.data())
def test_in_place_at_indices_is_recorded_exactly(data: st.DataObject) -> None:
    """``np.add.at`` reads and writes the elements at its indices."""
    shape = data.draw(SHAPES)
    x = np.zeros(shape, "<i4")
    key = data.draw(_indices(shape))
    mask = np.zeros(shape, bool)
    mask[key] = True
    expected = bytes_where(x, mask)
    try:
        np.add.at(np.zeros(shape, "<i4"), key, 1)
    except (IndexError, ValueError):
        return
    assert touched_by(x, lambda t: np.add.at(t, key, 1)) == (
        {READ: expected, WRITE: expected} if expected else {}
    )


FUNCTIONS: dict[str, tuple[Any, Any, Any]] = {
    # name: code, indices that are read, indices that are written, of an array of 24 numbers, 4 x 6
    "copyto": (lambda x: np.copyto(x, 1), None, ...),
    "copyto where": (lambda x: np.copyto(x, 1, where=np.arange(6) < 2), None, np.s_[:, :2]),
    "copyto from": (lambda x: np.copyto(np.zeros((4, 3)), x[:, ::2]), np.s_[:, ::2], None),
    "put": (lambda x: np.put(x, [1, -1], [5, 6]), None, ([0, 3], [1, 5])),
    "put clip": (lambda x: np.put(x, [99], 5, mode="clip"), None, np.s_[3, 5]),
    "put method": (lambda x: x.T.put([1], 5), None, np.s_[1, 0]),
    "place": (lambda x: np.place(x, np.eye(4, 6), [7, 8]), None, np.eye(4, 6, dtype=bool)),
    "putmask": (lambda x: np.putmask(x, np.eye(4, 6), [7, 8]), None, np.eye(4, 6, dtype=bool)),
    "fill_diagonal": (lambda x: np.fill_diagonal(x, 3), None, np.eye(4, 6, dtype=bool)),
    "put_along_axis": (
        lambda x: np.put_along_axis(x, np.array([[1], [2], [0], [5]]), 9, axis=1),
        None, ([0, 1, 2, 3], [1, 2, 0, 5]),
    ),
    "take_along_axis": (
        lambda x: np.take_along_axis(x, np.array([[1], [2], [0], [5]]), axis=1),
        ([0, 1, 2, 3], [1, 2, 0, 5]), None,
    ),
    "nan_to_num in place": (lambda x: np.nan_to_num(x, copy=False), ..., np.zeros((4, 6), bool)),
    "take": (lambda x: np.take(x, [0, 3], axis=1), np.s_[:, [0, 3]], None),
    "take flat": (lambda x: x.take([7, -1]), ([1, 3], [1, 5]), None),
    "take out": (lambda x: np.take(np.arange(9.0), [1, 2], out=x[0, :2]), None, np.s_[0, :2]),
    "extract": (lambda x: np.extract(np.eye(4, 6), x), np.eye(4, 6, dtype=bool), None),
    "where": (lambda x: np.where(np.eye(4, dtype=bool), x[:, :4], 0), np.s_[:, :4], None),
    "diagonal sum": (lambda x: np.diagonal(x).sum(), np.eye(4, 6, dtype=bool), None),
    "accumulate": (lambda x: np.add.accumulate(x[0], out=x[1]), np.s_[0], np.s_[1]),
    "cumsum": (lambda x: x[0].cumsum(out=x[1]), np.s_[0], np.s_[1]),
    "dot out": (lambda x: np.dot(x[:, :4], np.eye(4, 6), x), np.s_[:, :4], ...),
    "dot method": (lambda x: x[0].dot(x[1]), np.s_[:2], None),
    "dot of rows": (lambda x: np.dot(x[0], x[2]), ([0, 2],), None),
    "matmul": (lambda x: x[:, :2] @ np.ones(2), np.s_[:, :2], None),
    "outer": (
        lambda x: np.multiply.outer(x[0], x[:, 0]), (np.arange(4)[:, None] == 0) | (np.arange(6) == 0), None,
    ),
    "concatenate": (lambda x: np.concatenate([x[0], x[3]]), np.s_[::3], None),
    "concatenate out": (lambda x: np.concatenate([[1.0], [2.0]], out=x[0, :2]), None, np.s_[0, :2]),
    "sum": (lambda x: np.sum(x[:, 1]), np.s_[:, 1], None),
    "sum out": (lambda x: np.sum(np.ones((3, 6)), 0, None, x[2]), None, np.s_[2]),
    "mean": (lambda x: x[1:3].mean(axis=0), np.s_[1:3], None),
    "std": (lambda x: np.std(x[1]), np.s_[1], None),
    "clip": (lambda x: x[1].clip(0, 1, out=x[2]), np.s_[1], np.s_[2]),
    "round out": (lambda x: np.round(x[1], 0, x[2]), np.s_[1], np.s_[2]),
    "argmax": (lambda x: x[1].argmax(), np.s_[1], None),
    "sort": (lambda x: x[1].sort(), np.s_[1], np.s_[1]),
    "np.sort": (lambda x: np.sort(x[1]), np.s_[1], None),
    "partition": (lambda x: x[:, 0].partition(2), np.s_[:, 0], np.s_[:, 0]),
    "median in place": (lambda x: np.median(x[1], overwrite_input=True), np.s_[1], np.s_[1]),
    "fill": (lambda x: x[1].fill(3), None, np.s_[1]),
    "byteswap": (lambda x: x[1].byteswap(inplace=True), np.s_[1], np.s_[1]),
    "flat": (lambda x: x.flat[3], np.s_[0, 3], None),
    "flat of a view": (lambda x: x.T.flat[1], np.s_[1, 0], None),
    "flat slice": (lambda x: x.flat[4:8], np.isin(np.arange(24).reshape(4, 6), range(4, 8)), None),
    "flat write": (lambda x: x.flat.__setitem__(slice(0, 3), 1), None, np.s_[0, :3]),
    "flat all": (lambda x: setattr(x[1], "flat", 4), None, np.s_[1]),
    "flat loop": (lambda x: [a for _, a in zip(range(3), x.flat, strict=False)], np.s_[:], None),
    "length of flat": (lambda x: len(x.flat), None, None),
    "loop": (lambda x: [a + 1 for a in x[1]], np.s_[1], None),
    "loop over rows": (lambda x: [row[0] for row in x], np.s_[:, 0], None),
    "list": (lambda x: list(x[1]), np.s_[1], None),
    "unpack": (lambda x: max(*x[1]), np.s_[1], None),
    "tolist": (lambda x: x[1].tolist(), np.s_[1], None),
    "item": (lambda x: x.item(7), np.s_[1, 1], None),
    "item of two": (lambda x: x.item(-1, -2), np.s_[3, 4], None),
    "in": (lambda x: 3 in x[1], np.s_[1], None),
    "float": (lambda x: float(x[1, 2:3].reshape(())), np.s_[1, 2], None),
    "0-d": (lambda x: x[1, 2, ...] + 1, np.s_[1, 2], None),
    "0-d written": (lambda x: x[1, 2, ...].__setitem__((), 1), None, np.s_[1, 2]),
    "bool": (lambda x: bool(x[1, 2:3]), np.s_[1, 2], None),
    "repr": (lambda x: repr(x[1]), np.s_[1], None),
    "format": (lambda x: f"{x[1]}", np.s_[1], None),
    "format of one": (lambda x: f"{x[1, 2]:.2f}", np.s_[1, 2], None),
    "ravel": (lambda x: x.ravel(), None, None),
    "ravel copy": (lambda x: x[:, 1:3].ravel(), np.s_[:, 1:3], None),
    "reshape copy": (lambda x: np.reshape(x[:, 1:3], 8), np.s_[:, 1:3], None),
    "astype": (lambda x: x[1].astype(int), np.s_[1], None),
    "copy": (lambda x: x[1].copy(), np.s_[1], None),
    "np.array": (lambda x: np.array(x[1]), np.s_[1], None),
    "np.array of several": (lambda x: np.array([x[1], x[2]]), np.s_[1:3], None),
    "np.asarray": (lambda x: np.asarray(x)[1] + 1, np.s_[1], None),
    "np.asarray converted": (lambda x: np.asarray(x[1], np.float32), np.s_[1], None),
    "sliding window": (
        lambda x: np.lib.stride_tricks.sliding_window_view(x[0], 2)[1].sum(), np.s_[0, 1:3], None,
    ),
    "split": (lambda x: np.split(x, 2)[1].sum(), np.s_[2:], None),
    "in place": (lambda x: x[1].__iadd__(1), np.s_[1], np.s_[1]),
    "in place square": (lambda x: x[1].__ipow__(2), np.s_[1], np.s_[1]),
    "divmod": (lambda x: np.divmod(x[1], 2, out=(x[2], None)), np.s_[1], np.s_[2]),
    "apply_along_axis": (lambda x: np.apply_along_axis(lambda v: v[0], 1, x), np.s_[:, 0], None),
    "from another": (lambda x: x.__setitem__(0, x[1]), np.s_[1], np.s_[0]),
    "swap": (lambda x: x.__setitem__([0, 1], x[[1, 0]]), np.s_[:2], np.s_[:2]),
    "index of its own": (lambda x: np.arange(40)[x[1, :2].astype(int)], np.s_[1, :2], None),
    "search": (lambda x: x[1].searchsorted(3), np.s_[1], None),
    "equal": (lambda x: np.array_equal(x[0], x[1]), np.s_[:2], None),
    "empty": (lambda x: (x[:0].sum(), x[:0].__setitem__(..., 1), x[:0] + x[:0]), None, None),
    "shape": (lambda x: (x.shape, np.shape(x), len(x), x.dtype, x.T, np.zeros_like(x)), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_methods_are_recorded_exactly(name: str) -> None:
    """Each touches just what the table says, whatever its way through numpy, and computes what it does."""
    code, *keys = FUNCTIONS[name]
    x, y = np.arange(24.0).reshape(4, 6), np.arange(24.0).reshape(4, 6)
    expected, results = {}, []
    for kind, key in zip((READ, WRITE), keys, strict=True):
        mask = np.zeros((4, 6), bool)
        if key is not None:
            mask[key] = True
        if mask.any():
            expected[kind] = bytes_where(x, mask)
    assert touched_by(x, lambda t: results.append(code(t))) == expected
    plain = code(y)
    if name not in ("empty", "shape"):  # return tuples
        np.testing.assert_array_equal(np.asarray(results[0]), np.asarray(plain))
    np.testing.assert_array_equal(x, y)
