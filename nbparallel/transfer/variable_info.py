"""Descriptions of variables: class, and shape or length, without running the user's code.

A property of the user's may raise, print, compute for an hour or end the process; it must not be run by
a mere inspection.  So only C code and installed libraries are asked for a shape.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from nbparallel.sharing.store import Store
from nbparallel.sharing.tensor_storage import locate_tensor
from nbparallel.sharing.tensors import is_module, is_plain_tensor, tensor_types
from nbparallel.wire.inspection import Origin, VariableInfo
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
