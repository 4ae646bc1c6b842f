"""Descriptions of variables: class, and shape or length, without running the user's code.

A property of the user's may raise, print, compute for an hour or end the process; it must not be run by
a mere inspection.  So only C code and installed libraries are asked for a shape.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from nbparallel.sharing.store import Store
from nbparallel.sharing.tensor_storage import locate_tensor
from nbparallel.sharing.tensors import (
    array_of,
    bits_name,
    is_module,
    is_plain_tensor,
    shown_dtype,
    tensor_of,
    tensor_types,
)
from nbparallel.wire.inspection import Number, Origin, ShownBlock, ShownValue, VariableInfo
from nbparallel.wire.units import size_text

MOST_BROUGHT = 64 << 20
"""Bytes of a value of each rank that a line advises to bring into the notebook, at most; arbitrary."""
_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)
_MOST_AXES = 64
"""numpy's own limit; a longer shape is none."""
_CLASS_NAME: Any = type.__dict__["__qualname__"]
_CLASS_DICT: Any = type.__dict__["__dict__"]
"""Read past what a metaclass may say."""
_DESCRIPTORS = (property, types.GetSetDescriptorType, types.MemberDescriptorType)
"""What computes an attribute."""


def describe_variable(name: str, value: Any, store: Store, origin: Origin = Origin.OWN) -> VariableInfo:
    """Return a description of a variable; never raises, changes nothing, and copies no value."""
    try:
        if issubclass(type(value), np.ndarray):
            return _seen_array(name, value, store, origin)
        if (tensors := _tensors_in(value)) is not None:
            return _seen_tensors(name, value, tensors, store, origin)
        return VariableInfo(name, *_class_and_form(value), origin)
    except Exception:  # noqa: BLE001  an odd metaclass: only its existence is reported
        return VariableInfo(name, "object", "", origin)


def advice_to_bring(name: str, value: Any) -> str:
    """Return how the notebook gets the ranks' values of a name: not the whole of a large one."""
    try:
        nbytes = int(getattr(value, "nbytes", 0))
        if not nbytes and type(value).__module__.partition(".")[0] == "pandas":
            nbytes = int(np.sum(value.memory_usage()))
    except (AttributeError, TypeError, ValueError):
        nbytes = 0
    if nbytes > MOST_BROUGHT:
        return (
            f"{name} has {size_text(nbytes)} on each rank, so bring what you need of it: -o part on a cell "
            "that ends with that"
        )
    return f"-o {name} on a cell that ends with `{name}` brings the ranks' there"


def has_memory(value: Any) -> bool:
    """Return whether a variable can lie in shared memory: an array, a tensor, or a module of torch."""
    return issubclass(type(value), (np.ndarray, *tensor_types()))


def _class_and_form(value: Any) -> tuple[str, str]:
    cls = type(value)
    if value is None:
        return "None", ""
    if issubclass(cls, type):
        return "class", ""
    if cls in (types.FunctionType, types.BuiltinFunctionType):
        return "function", ""
    return str(_CLASS_NAME.__get__(cls)), _form(value)


def _seen_array(name: str, value: Any, store: Store, origin: Origin) -> VariableInfo:
    plain: np.ndarray[Any, Any] = np.ndarray.view(value, np.ndarray)  # a subclass may misreport its shape
    kind = str(_CLASS_NAME.__get__(type(value)))
    form = f"{plain.shape} {_dtype_text(plain.dtype)}"
    place = store.location(plain)
    if place is None:
        return VariableInfo(name, kind, form, origin, plain.flags.writeable, nbytes=plain.nbytes)
    may = place.writable and place.for_all
    extent = place.segment, place.start, place.stop
    return VariableInfo(name, kind, form, origin, may, *extent, nbytes=plain.nbytes)


def _tensors_in(value: Any) -> list[Any] | None:
    """Return a plain tensor itself, or those of a module, without the user's code; None: it is neither."""
    if is_plain_tensor(value):
        return [value]
    if not has_memory(value) or not is_module(value):
        return None
    found: dict[int, Any] = {}
    modules, seen = [value], {id(value)}
    for module in modules:  # grows while it is walked
        inside = object.__getattribute__(module, "__dict__")
        parts = [m for m in inside["_modules"].values() if m is not None and id(m) not in seen]
        seen.update(map(id, parts))
        modules += parts
        found |= {
            id(t): t for part in ("_parameters", "_buffers") for t in inside[part].values() if t is not None
        }
    return list(found.values())


def _seen_tensors(name: str, value: Any, tensors: list[Any], store: Store, origin: Origin) -> VariableInfo:
    kind, form = _class_and_form(value)
    places = [locate_tensor(tensor, store) for tensor in tensors]
    shared = [place for place in places if place is not None]
    if origin is Origin.COPIED and shared and len(shared) == len(places):
        origin = Origin.SHARED
    if len(places) == 1 and tensors[0] is value:
        form = f"{tuple(value.size())} {str(value.dtype).removeprefix('torch.')}"
        if shared:
            place = shared[0]
            return VariableInfo(name, kind, form, origin, True, place.segment, place.start, place.stop)
    return VariableInfo(name, kind, form, origin, segments=tuple(sorted({place.segment for place in shared})))


def _dtype_text(dtype: np.dtype[Any]) -> str:
    text = str(dtype)
    return text if len(text) <= 24 else f"{len(dtype.names or ())} fields"


def _form(value: Any) -> str:
    cls = type(value)
    if cls in _SIZED:
        return f"of {len(value):,}"
    return str(_shape(value) or "")


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape that an object has, if it can be had without the user's code."""
    found = _attribute(value, "shape")
    if issubclass(type(found), _DESCRIPTORS):
        if not _is_installed(type(value)):
            return None
        try:
            found = found.__get__(value)
        except BaseException:  # noqa: BLE001  whatever a library does there: it is only about a table
            return None
    if not issubclass(type(found), tuple) or len(found) > _MOST_AXES:
        return None
    sizes = tuple(tuple.__iter__(found))
    return sizes if all(type(size) is int for size in sizes) else None


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running any ``__getattr__``.

    `inspect.getattr_static` asks a class for its dictionary, which a metaclass may answer with code.
    """
    inside = [_CLASS_DICT.__get__(base) for base in type.mro(type(value))]
    own = next((names["__dict__"] for names in inside if "__dict__" in names), None)
    if type(own) is types.GetSetDescriptorType and name in (attributes := own.__get__(value)):
        return attributes[name]
    return next((names[name] for names in inside if name in names), None)


def _is_installed(cls: type) -> bool:
    """Whether a class, and what it derives from, comes from a library and not from a notebook."""
    modules = [_CLASS_DICT.__get__(base).get("__module__", "builtins") for base in type.mro(cls)]
    return all(type(module) is str and module != "__main__" for module in modules)


# Beginnings of values, for pictures: few numbers, as plain Python, without running the user's code.
#
# At most `MOST_SHOWN` numbers of a value are shown.  `MOST_NUMBERS` of it travel, so that the picture can
# say which rank had which; what is no number is described in words (`variable_info`).  Nothing else of an
# array is copied, and nothing is pickled that is not plain.

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
