"""Doors: functions that look at the memory of an array themselves, replaced for the time of a checked cell.

What they return to the cell's own code is traced; for a library the whole array counts as read.  torch and
numba may read, and write, what they are given until the cell ends.  Names of the cell that stand for such a
function are replaced as well; a module that has imported one by name before calls the original, and what it
does is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_recorder import AccessRecorder
from nbparallel.distributed.races.array_methods import expose
from nbparallel.distributed.races.numpy_functions import retraced
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    arrays_in,
    plain,
    plain_value,
    read,
    trace,
    traced_in,
)

CONVERTING = (
    "array", "asarray", "asanyarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite", "require",
)  # fmt: skip
"""Of numpy: return a view where they can, else a copy."""
EXPOSING = ("frombuffer", "from_dlpack")
"""Of numpy: what they return looks at the memory itself."""
ITERATING = ("nditer", "nested_iters")
"""Of numpy: do so as well if they write by their `op_flags`; else they read all."""
TENSORS = ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")
"""Of torch: share the memory."""
COPIES = ("tensor",)
"""Of torch: read all."""
MAKERS = ("zeros", "ones", "empty", "full", "share")
"""Of this package: other ranks may get to see what they return."""
Namespace = MutableMapping[str, Any]


@contextmanager
def doors(recorder: AccessRecorder, namespace: Namespace | None = None) -> Iterator[None]:
    """Replace the functions while the block runs, in modules and among the names of the cell."""
    names: Namespace = {} if namespace is None else namespace
    known = set(sys.modules)
    replaced: list[tuple[Any, str, Any, Any]] = []
    try:
        for owner, name, make in _doors(recorder):
            original = getattr(owner, name, None)
            if original is not None:
                replaced.append((owner, name, original, make(original)))
                setattr(owner, name, replaced[-1][3])
        _exchange(names, {id(original): other for _, _, original, other in replaced})
        register_numba()
        yield
    finally:
        for owner, name, original, other in replaced:
            if getattr(owner, name, None) is other:  # else the user's code has put something else there
                setattr(owner, name, original)
        originals = {id(other): original for _, _, original, other in replaced}
        _exchange(names, originals)
        for module in sys.modules.keys() - known:  # the cell has imported it: `from numpy import asarray`
            _exchange(getattr(sys.modules.get(module), "__dict__", {}), originals)


def _exchange(names: Namespace, others: dict[int, Any]) -> None:
    """Bind names of some objects, given by identity, to others."""
    for name, value in list(names.items()):
        if id(value) in others:
            names[name] = others[id(value)]


def _doors(recorder: AccessRecorder) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    """Yield owner and name of each function, and what makes its replacement."""
    torch = sys.modules.get("torch")
    for name in CONVERTING:
        yield np, name, partial(_converting, recorder)
    for name in EXPOSING:
        yield np, name, partial(_exposing, f"np.{name}")
    for name in ITERATING:
        yield np, name, partial(_iterating, f"np.{name}")
    yield np.vectorize, "__call__", _reading
    for name in MAKERS:  # to import it from below would be a circle
        yield sys.modules["nbparallel"], name, _making
    for name in TENSORS:
        yield torch, name, partial(_exposing, f"torch.{name}")
    for name in COPIES:
        yield torch, name, _reading


def _converting(recorder: AccessRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def convert(*args: Any, **options: Any) -> Any:
        inputs = list(traced_in((args, options)))
        if not inputs:
            return original(*args, **options)
        found = original(*plain_value(args), **plain_value(options))
        # a function of C has no frame: then the frame is its caller's, which does not name this one
        own = original.__name__ in sys._getframe(1).f_code.co_names
        own = own and not recorder.lines.called_from_library(2)
        for x in inputs:
            if not (own and any(np.may_share_memory(result, x) for result in arrays_in(found))):
                read(x)
        return retraced(found, inputs) if own else found

    return convert


def _exposing(door: str, original: Any) -> Any:
    """Return a function that gives the memory of its arguments away."""

    @wraps(original, updated=())
    def passed(*args: Any, **options: Any) -> Any:
        for x in traced_in((args, options)):
            expose(x, door)
        return original(*plain_value(args), **plain_value(options))

    return passed


def _iterating(door: str, original: Any) -> Any:
    reading, exposing = _reading(original), _exposing(door, original)

    @wraps(original, updated=())
    def iterate(op: Any, *args: Any, **options: Any) -> Any:
        flags = str((args, options.get("op_flags")))
        writes = "readwrite" in flags or "writeonly" in flags
        return (exposing if writes else reading)(op, *args, **options)

    return iterate


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original, updated=())
    def passed(*args: Any, **options: Any) -> Any:
        read((args, options))
        return original(*plain_value(args), **plain_value(options))

    return passed


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        return trace(found) if type(found) is np.ndarray else found

    return make


def register_numba() -> None:
    """Have numba's own functions count as a door; once, since it knows nothing of traced arrays without."""
    typeof = sys.modules.get("numba.core.typing.typeof")
    if typeof is None or TracedArray in typeof.typeof_impl.registry:
        return
    of_plain = typeof.typeof_impl.dispatch(np.ndarray)

    def of_traced(array: Any, context: Any) -> Any:
        expose(array, "numba")
        return of_plain(plain(array), context)

    typeof.typeof_impl.register(TracedArray)(of_traced)
