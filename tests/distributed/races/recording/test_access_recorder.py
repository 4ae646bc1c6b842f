"""What the recorder keeps: structured elements, many elements, numbers that were stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed.races.access_log import READ, WRITE
from nbparallel.distributed.races.traced_array import trace
from tests.distributed.races.recording.recorded_memory import Memory, touched_by

PADDED = np.dtype({"names": ["a", "b"], "formats": ["i4", "f8"], "offsets": [4, 16], "itemsize": 32})
A, B = set(range(4, 8)), set(range(16, 24))


def _rows(*rows: int, of: set[int]) -> set[int]:
    return {32 * row + byte for row in rows for byte in of}


ALL = set(range(32))
FIELDS: dict[str, tuple[Any, set[int], set[int]]] = {
    "field": (lambda x: x["a"].sum(), _rows(0, 1, 2, of=A), set()),
    "field of some": (lambda x: x[1:]["b"] + 1, _rows(1, 2, of=B), set()),
    "field written": (lambda x: x["b"].__setitem__(1, 3.0), set(), _rows(1, of=B)),
    "all fields": (lambda x: x.copy(), _rows(0, 1, 2, of=ALL), set()),
    "element": (lambda x: x[1]["a"], _rows(1, of=ALL), set()),
    "element assigned": (lambda x: x.__setitem__(0, (1, 2.0)), set(), _rows(0, of=ALL)),
    "element copied": (lambda x: x.__setitem__(0, x[2]), _rows(2, of=ALL), _rows(0, of=ALL)),
    "mask": (lambda x: x[np.array([True, False, True])], _rows(0, 2, of=ALL), set()),
    "fancy written": (lambda x: x.__setitem__([0, 2], x[1:2]), _rows(1, of=ALL), _rows(0, 2, of=ALL)),
    "compared": (lambda x: x[:1]["a"] == x[1:2]["a"], _rows(0, 1, of=A), set()),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_are_recorded(name: str) -> None:
    """A field is as exact as an array; an element of several fields counts as a whole."""
    code, read, written = FIELDS[name]
    expected = {kind: bytes_ for kind, bytes_ in ((READ, read), (WRITE, written)) if bytes_}
    assert touched_by(np.zeros(3, PADDED), code) == expected


def _accesses(x: Any, code: Any) -> Any:
    memory = Memory(x)
    with memory.checked():
        code(trace(x))
    return memory.recorder.take()


STORED = {
    "number": (lambda x: x.__setitem__(0, 1.0), b"1.0"),
    "number to many": (lambda x: x.__setitem__(slice(2, 5), 3), b"3"),
    "numpy's": (lambda x: x.__setitem__([1, 5, 6], np.float64(2)), b"2.0"),
    "fill": (lambda x: x.fill(4), b"4"),
    "the same again": (lambda x: [x.__setitem__(0, 1), x.__setitem__(1, 1)], b"1"),
    "another": (lambda x: [x.__setitem__(0, 1), x.__setitem__(1, 2)], None),
    "an array": (lambda x: x.__setitem__(slice(0, 2), [1, 1]), None),
    "computed": (lambda x: np.add(x, 1, out=x), None),
}


@pytest.mark.parametrize("name", STORED)
def test_one_number_that_was_stored_is_known(name: str) -> None:
    """Ranks that all store the same number do no harm: so it is noted, unless it differs."""
    code, stored = STORED[name]
    found = [access.stored for access in _accesses(np.zeros(9), code)[0] if access.kind == WRITE]
    assert set(found) == {stored}
