"""Doors: functions that look at the memory of an array themselves, replaced for the time of a checked cell.

What they return to the cell's own code is traced; for a library the whole array counts as read.  torch and
numba may read, and write, what they are given until the cell ends.  Names of the cell that stand for such a
function are replaced as well; a module that has imported one by name before calls the original, and what it
does is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import wraps
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
"""Of numpy: do so as well if `op_flags` say that they write; else they read all."""
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
    with ExitStack() as stack:
        replaced = _Replacements(stack, namespace)
        for name in CONVERTING:
            replaced.replace(np, name, lambda original: _converting(original, recorder))
        for name in EXPOSING:
            replaced.replace(np, name, lambda original: _exposing(original, f"np.{original.__name__}"))
        for name in ITERATING:
            replaced.replace(np, name, _iterating)
        replaced.replace(np.vectorize, "__call__", _reading)
        for name in MAKERS:  # to import it from below would be a circle
            replaced.replace(sys.modules["nbparallel"], name, _making)
        torch = sys.modules.get("torch")
        for name in TENSORS:
            replaced.replace(torch, name, lambda original: _exposing(original, f"torch.{original.__name__}"))
        for name in COPIES:
            replaced.replace(torch, name, _reading)
        register_numba()
        yield


class _Replacements:
    """Puts functions in the place of others, and these back whatever happens."""

    def __init__(self, stack: ExitStack, namespace: Namespace | None) -> None:
        self._stack, self._namespace = stack, namespace if namespace is not None else {}
        self._modules = set(sys.modules)
        self._originals: list[tuple[Any, Any]] = []
        """Replacements, with what they replace."""
        stack.callback(self._put_back_in_new_modules)

    def _put_back_in_new_modules(self) -> None:
        """Put functions back into modules that the cell has imported: `from numpy import asarray`."""
        originals = {id(replacement): original for replacement, original in self._originals}
        for name in sys.modules.keys() - self._modules:
            names = getattr(sys.modules.get(name), "__dict__", {})
            for key, value in list(names.items()):
                if id(value) in originals:
                    names[key] = originals[id(value)]

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute, and what the cell's names have of it."""
        original = getattr(owner, name, None)
        if original is None:
            return
        replacement = make(original)
        self._originals.append((replacement, original))

        def put_back() -> None:
            if getattr(owner, name, None) is replacement:  # else the user's code has put something else there
                setattr(owner, name, original)

        self._stack.callback(put_back)
        setattr(owner, name, replacement)
        self._stack.callback(self._put_names_back, original, replacement)
        for key, value in list(self._namespace.items()):
            if value is original:
                self._namespace[key] = replacement

    def _put_names_back(self, original: Any, replacement: Any) -> None:
        for key, value in list(self._namespace.items()):
            if value is replacement:
                self._namespace[key] = original


def _converting(original: Callable[..., Any], recorder: AccessRecorder) -> Callable[..., Any]:
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


def _exposing(original: Any, door: str) -> Any:
    """Return a function that gives the memory of its arguments away."""

    @wraps(original, updated=())
    def passed(*args: Any, **options: Any) -> Any:
        for x in traced_in((args, options)):
            expose(x, door)
        return original(*plain_value(args), **plain_value(options))

    return passed


def _iterating(original: Any) -> Any:
    reading, exposing = _reading(original), _exposing(original, f"np.{original.__name__}")

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
