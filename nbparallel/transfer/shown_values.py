"""Beginnings of values, for pictures: few numbers, as plain Python, without running the user's code.

At most `MOST_SHOWN` numbers of a value are shown.  `MOST_NUMBERS` of it travel, so that the picture can say
which rank had which; what is no number is described in words (`variable_info`).  Nothing else of an array is
copied, and nothing is pickled that is not plain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from nbparallel.sharing.store import Store
from nbparallel.sharing.tensors import array_of, bits_name, is_plain_tensor, shown_dtype, tensor_of
from nbparallel.transfer.variable_info import describe_variable
from nbparallel.wire.inspection import Number, ShownBlock, ShownValue

MOST_SHOWN = 16
"""Numbers of a value that are shown."""
MOST_BLOCKS = 8
"""Arrays of a list that are shown."""
MOST_ROWS = 8
"""Rows of an array that has more numbers than are shown."""
MOST_NUMBERS = 4096
"""Numbers of a value that travel."""
MOST_LETTERS = 24
"""Of a string."""
_SCALARS = frozenset({bool, int, float, complex})
_LISTS = frozenset({list, tuple})
_KINDS = "biufcUSMm"
"""Of dtypes: numbers, strings, times."""

AnyArray = np.ndarray[Any, np.dtype[Any]]
Parts = Callable[[int], Sequence[slice]]
"""``parts(n)``: how the ranks divide ``range(n)``, in their order."""


def show_value(value: Any, store: Store, parts: Parts) -> ShownValue:
    """Return the beginning of a value; never raises."""
    try:
        if type(value) in _LISTS:
            return _shown_list(value, store)
        array = _plain_array(value)
        if array is None:
            return ShownValue((ShownBlock(word=_word(value, store)),))
        return _shown_array(array, store, parts)
    except Exception as error:  # noqa: BLE001  a picture must not end the cell
        return ShownValue((ShownBlock(word=f"{type(value).__name__}, {type(error).__name__} while drawing"),))


def _plain_array(value: Any) -> AnyArray | None:
    """Return a number, an array or a tensor as an array over the same memory; None: it is in words."""
    array = _any_array(value)
    fits = array is not None and (array.dtype.kind in _KINDS or bits_name(array.dtype))
    return array if fits else None


def _any_array(value: Any) -> AnyArray | None:
    cls = type(value)
    if cls in _SCALARS or issubclass(cls, np.generic):
        return None if cls is int and value.bit_length() > 64 else np.asarray(value)
    if issubclass(cls, np.ndarray):
        masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
        # a subclass may misreport its shape, and a masked array hides numbers that its memory has
        return None if issubclass(cls, masked) else np.ndarray.view(value, np.ndarray)
    if not is_plain_tensor(value):
        return None
    try:
        array: AnyArray = array_of(value)
    except TypeError:  # sparse, on another device …
        return None
    return array


def _shown_array(array: AnyArray, store: Store, parts: Parts) -> ShownValue:
    place = store.location(array)
    found = [] if place is None or not array.ndim or not array.size else list(parts(len(array)))
    each = max(1, MOST_SHOWN // max(1, len(found)))
    return ShownValue(
        blocks=(_block(array, MOST_SHOWN),),
        numbers=_elements(array, 0, MOST_NUMBERS),
        complete=array.size <= MOST_NUMBERS,
        segment=0 if place is None else place.segment,
        start=0 if place is None else place.start,
        stop=0 if place is None else place.stop,
        parts=tuple(_block(array[part], each, rank) for rank, part in enumerate(found)),
    )


def _block(array: AnyArray, most: int, rank: int = -1) -> ShownBlock:
    form = "" if not array.ndim else f"{' × '.join(map(str, array.shape))} {shown_dtype(array.dtype)}"
    return ShownBlock(tuple(_rows(array, most)), array.size, form, rank=rank)


def _rows(array: AnyArray, most: int) -> Iterator[tuple[Number, ...]]:
    """Yield the first rows of the last axis, as far as `most` numbers go."""
    if array.ndim < 2 or not array.size:
        yield _elements(array, 0, most)
        return
    length = array.shape[-1]
    rows = array.size // length
    if array.size > most:
        rows = min(rows, max(1, most // min(length, 4)), MOST_ROWS)
    for row in range(rows):
        yield _elements(array, row * length, row * length + min(length, max(1, most // rows)))


def _elements(array: AnyArray, start: int, stop: int) -> tuple[Number, ...]:
    """Return elements, counted as if the array were flat; only these are copied."""
    found: AnyArray = array.flat[start:stop] if array.ndim else array.reshape(1)
    kind = found.dtype.kind
    if kind == "V":  # bits of a dtype that only torch has
        return tuple(tensor_of(found).float().tolist())
    if kind == "f":
        found = found.astype(np.float64)
    elif kind == "c":
        found = found.astype(np.complex128)
    elif kind not in "biu":
        return tuple(_cut(str(element)) for element in found)
    return tuple(found.tolist())


def _shown_list(value: Sequence[Any], store: Store) -> ShownValue:
    arrays = [_plain_array(element) for element in islice(value, MOST_NUMBERS)]
    if not arrays:
        return ShownValue((ShownBlock(word=f"empty {type(value).__name__}"),))
    simple = all(array is not None and not array.ndim for array in arrays[:MOST_SHOWN])
    count = min(len(arrays), MOST_SHOWN if simple else MOST_BLOCKS)
    each = max(1, MOST_SHOWN // count)
    numbers: list[Number] = []
    complete = len(arrays) == len(value)
    for array in (array for array in arrays if array is not None):
        complete = complete and len(numbers) + array.size <= MOST_NUMBERS
        numbers += _elements(array, 0, MOST_NUMBERS - len(numbers))
        if not complete:
            break
    blocks = tuple(
        ShownBlock(word=_word(element, store)) if array is None else _block(array, each)
        for element, array in zip(value[:count], arrays, strict=False)
    )
    return ShownValue(blocks, len(value) - count, tuple(numbers), complete)


def _word(value: Any, store: Store) -> str:
    if type(value) is str:
        return repr(_cut(value))
    if type(value) is int:
        return "a number of more than 64 bits"
    if is_plain_tensor(value):
        where = "" if value.device.type == "cpu" else f", on {value.device}"
        form = "" if str(value.layout) == "torch.strided" else f", {value.layout}"
        text = f"{type(value).__name__} {tuple(value.size())} {value.dtype}{form}{where}"
        return text.replace("torch.", "")
    return describe_variable("", value, store).looks


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
