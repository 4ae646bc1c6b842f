"""Doors: functions that look at the memory of an array themselves, replaced for the time of a checked cell.

What they return to the cell's own code is traced; for a library the whole array counts as read.  torch,
numba and views of bytes may read, and write, what they are given until the cell ends.  Names of the cell
that stand for such a function are replaced as well; a module that has imported one by name before calls the
original, and what it does is not seen.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
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
EXPOSING = ("nditer", "nested_iters", "frombuffer", "from_dlpack")
"""Of numpy: what they return looks at the memory itself."""
ITERATING = ("nditer", "nested_iters")
"""Of these: write only what `op_flags` say."""
TENSORS = ("from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack")
"""Of torch: share the memory."""
COPIES = ("tensor",)
"""Of torch: read all."""
MAKERS = ("zeros", "ones", "empty", "full", "share")
"""Of this package: other ranks may get to see what they return."""
_MASKED = "numpy.ma"
Namespace = MutableMapping[str, Any]
_open: _Replacements | None = None
"""Those of the cell that runs."""


def _set_open(replacements: _Replacements | None) -> None:
    global _open
    _open = replacements


@contextmanager
def doors(recorder: AccessRecorder, namespace: Namespace | None = None) -> Iterator[None]:
    """Replace the functions while the block runs, in modules and among the names of the cell."""
    with ExitStack() as stack:
        replaced = _Replacements(stack, namespace)
        for name in CONVERTING:
            replaced.replace(np, name, lambda original: _converting(original, recorder))
        for name in EXPOSING:
            replaced.replace(np, name, lambda original: _exposing(original, f"np.{original.__name__}"))
        replaced.replace(np.lib.stride_tricks, "as_strided", _viewing)
        for name in MAKERS:  # to import it from below would be a circle
            replaced.replace(sys.modules["nbparallel"], name, _making)
        replaced.replace(np.vectorize, "__call__", _vectorized)
        replaced.replace(np.ndenumerate, "__init__", _enumerated)
        if not hasattr(np.ndarray, "__buffer__"):  # before 3.12; then it says so itself
            for name in ("memoryview", "bytearray"):
                replaced.replace_name(name, _exposing(getattr(builtins, name), name))
        stack.callback(_set_open, _open)
        _set_open(replaced)
        open_library_doors()
        yield


def open_library_doors() -> None:
    """Replace the functions of torch and numba, if they were imported since."""
    torch = sys.modules.get("torch")
    if _open is None:
        return  # a function of the cell that is called later
    if "torch" not in _open.libraries and not _is_initializing(torch) and hasattr(torch, "from_numpy"):
        _open.libraries.add("torch")
        for name in TENSORS:
            _open.replace(torch, name, lambda original: _exposing(original, f"torch.{original.__name__}"))
        for name in COPIES:
            _open.replace(torch, name, _reading)
    register_numba()


def _is_initializing(module: Any) -> bool:
    """Whether another thread imports it: what takes a name from it now would keep it."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Replacements:
    """Puts functions in the place of others, and these back whatever happens.

    Attributes
    ----------
    libraries : set of str
        Those whose doors are open.
    """

    def __init__(self, stack: ExitStack, namespace: Namespace | None) -> None:
        self.libraries: set[str] = set()
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

    def replace_name(self, name: str, replacement: Any) -> None:
        """Have a builtin be another one in the cell's own code only: elsewhere many compare its type."""
        if name in self._namespace:
            return

        def remove() -> None:
            if self._namespace.get(name) is replacement:
                del self._namespace[name]

        self._stack.callback(remove)
        self._namespace[name] = replacement

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
        caller = sys._getframe(1)
        # a function of C has no frame: then the frame is its caller's, which does not name this one
        own = original.__name__ in caller.f_code.co_names and not recorder.lines.called_from_library(2)
        for x in inputs:
            shares = any(np.may_share_memory(result, x) for result in arrays_in(found))
            if shares and _is_masked_by_user(caller, recorder):
                expose(x, _MASKED)
            elif not (own and shares):
                read(x)
        return retraced(found, inputs) if own else found

    return convert


def _is_masked_by_user(frame: FrameType | None, recorder: AccessRecorder) -> bool:
    """Whether the cell's code makes a masked array, which writes what numpy does not show."""
    masked = False
    while frame is not None and frame.f_globals.get("__name__", "").startswith("numpy."):
        masked = masked or frame.f_globals["__name__"].startswith(_MASKED)
        frame = frame.f_back
    return masked and frame is not None and recorder.lines.is_users(frame.f_code.co_filename)


def _exposing(original: Any, door: str) -> Any:
    """Return a function, or a class of the same name, that gives the memory of its arguments away."""

    def pass_on(args: Any, options: Any) -> tuple[Any, Any]:
        reads_only = original.__name__ in ITERATING and not any(
            flag in str((args[1:], options.get("op_flags"))) for flag in ("readwrite", "writeonly")
        )
        for x in traced_in((args, options)):
            expose(x, door, reads_only=reads_only)
        return plain_value(args), plain_value(options)

    @wraps(original, updated=())
    def passed(*args: Any, **options: Any) -> Any:
        args, options = pass_on(args, options)
        return original(*args, **options)

    if not isinstance(original, type):
        return passed

    class OfClass(type):
        """Has what is made by the original pass for an instance of its replacement."""

        def __call__(cls, *args: Any, **options: Any) -> Any:
            args, options = pass_on(args, options)
            return original(*args, **options)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

        def __getattr__(cls, name: str) -> Any:
            return getattr(original, name)

    return OfClass(original.__name__, (), {"__doc__": original.__doc__, "__module__": original.__module__})


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def passed(*args: Any, **options: Any) -> Any:
        for x in traced_in((args, options)):
            read(x)
        return original(*plain_value(args), **plain_value(options))

    return passed


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        return trace(found) if type(found) is np.ndarray else found

    return make


def _viewing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def viewed(x: Any, *args: Any, **options: Any) -> Any:
        if type(x) is not TracedArray:
            return original(x, *args, **options)
        return trace(original(plain(x), *args, **options))

    return viewed


def _vectorized(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        for x in traced_in((args, options)):
            read(x)
        return original(self, *plain_value(args), **plain_value(options))

    return call


def _enumerated(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def init(self: Any, arr: Any) -> None:
        if type(arr) is TracedArray:
            self.iter = arr.flat
        else:
            original(self, arr)

    return init


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
