"""A checked cell on a rank: while it runs, shared arrays are traced, and operations note what they order."""

from __future__ import annotations

import ast
import copy
import io
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial, wraps
from socket import socket
from typing import Any

import numpy as np

from nbparallel import sharing
from nbparallel.distributed.races.access_log import READ, WRITE, AccessLog, ArrayName
from nbparallel.distributed.races.access_recorder import LIMIT_NBYTES, AccessRecorder, UserLines
from nbparallel.distributed.races.numpy_functions import call_recorded, expose, retraced
from nbparallel.distributed.races.operations import CheckedOperations, OperationOrder
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    arrays_in,
    plain,
    plain_value,
    read,
    recording,
    seen,
    touch,
    trace,
    traced_in,
)
from nbparallel.distributed.runtime.call_site import label_function
from nbparallel.distributed.runtime.observers import ObservedCell
from nbparallel.sharing.memory.array_layout import extent

# Doors: functions that look at the memory of an array themselves, replaced for the time of a checked cell.
#
# What they return to the cell's own code is traced; for a library the whole array counts as read.  torch and
# numba may read, and write, what they are given until the cell ends.  Names of the cell that stand for such a
# function are replaced as well; a module that has imported one by name before calls the original, and what it
# does is not seen.

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
def doors(recorder: AccessRecorder, names: Namespace) -> Iterator[None]:
    """Replace the functions while the block runs, in modules and among the names of the cell."""
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
    torch, ours = sys.modules.get("torch"), sys.modules["nbparallel"]  # to import it from below: a circle
    yield from ((np, name, partial(_converting, recorder)) for name in CONVERTING)
    yield from ((np, name, partial(_passing, f"np.{name}")) for name in EXPOSING)
    yield from ((np, name, partial(_iterating, f"np.{name}")) for name in ITERATING)
    yield np.vectorize, "__call__", partial(_passing, "")
    yield from ((ours, name, _making) for name in MAKERS)
    yield from ((torch, name, partial(_passing, f"torch.{name}")) for name in TENSORS)
    yield from ((torch, name, partial(_passing, "")) for name in COPIES)


def _converting(recorder: AccessRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def convert(*args: Any, **options: Any) -> Any:
        inputs = list(traced_in((args, options)))
        if not inputs:
            return original(*args, **options)
        found = original(*plain_value(args), **plain_value(options))
        # a function of C has no frame: then the frame is its caller's, which does not name this one
        caller = sys._getframe(1).f_code
        is_users = recorder.lines.label_of(caller.co_filename) is not None
        own = is_users and original.__name__ in caller.co_names
        for x in inputs:
            if not (own and any(np.may_share_memory(result, x) for result in arrays_in(found))):
                read(x)
        return retraced(found, inputs) if own else found

    return convert


def _passing(door: str, original: Any) -> Any:
    """Return a function that reads its arguments; through a door it gives their memory away."""
    note = partial(expose, door=door) if door else partial(touch, kind=READ)

    @wraps(original, updated=())
    def passed(*args: Any, **options: Any) -> Any:
        for x in traced_in((args, options)):
            note(x)
        return original(*plain_value(args), **plain_value(options))

    return passed


def _iterating(door: str, original: Any) -> Any:
    reading, exposing = _passing("", original), _passing(door, original)

    @wraps(original, updated=())
    def iterate(op: Any, *args: Any, **options: Any) -> Any:
        flags = str((args, options.get("op_flags")))
        writes = "readwrite" in flags or "writeonly" in flags
        return (exposing if writes else reading)(op, *args, **options)

    return iterate


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


# Code of a checked cell, with calls where numpy reads or writes a traced array and asks nothing.
#
# ::
#
#     private[2:5] = shared[2:5]     private[2:5] = seen_value(shared[2:5], private)
#     private[shared]                private[seen_value(shared)]
#     private.dot(shared)            seen_method(private, "dot")(shared)
#     rng.shuffle(shared)            seen_method(rng, "shuffle")(shared)
#
# A plain array copies from another one, and is indexed by it, within numpy, whatever the other's class.  Code
# that was compiled before, in other cells and modules, stays as it is: such accesses in it are not seen.

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "choose": ("choices", "out"), "compress": ("condition", "axis", "out"), "dot": ("b", "out"),
    "take": ("indices", "axis", "out"),
}  # fmt: skip
"""Of methods that write `out`, which may be given by position."""
_ARRAY = (*_PARAMETERS, "put", "repeat", "searchsorted")
_GENERATOR = (
    "choice", "permutation", "permuted", "random", "shuffle", "standard_exponential", "standard_gamma",
    "standard_normal",
)  # fmt: skip
METHODS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_ARRAY, (np.ndarray,)),
    **dict.fromkeys(_GENERATOR, (np.random.Generator, np.random.RandomState)),
    **dict.fromkeys(("readinto", "write"), (io.IOBase,)), **dict.fromkeys(("send", "sendall"), (socket,)),
}  # fmt: skip
"""Of plain arrays, generators, files and sockets: read what they are passed, or fill it."""
COMPILERS = frozenset({
    "cfunc", "generated_jit", "guvectorize", "jit", "njit", "numba", "script", "stencil",
})  # fmt: skip
"""Of numba and torch: names of what compiles functions otherwise, and knows none of these calls."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class SeenCode(ast.NodeTransformer):
    """Puts the calls into the tree of a cell.

    A function may run after the cell, and elsewhere: so the code imports what it calls.  Where something else
    than Python compiles functions, they stay as they are.
    """

    _has_compiler = False

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Find out whether functions may be compiled otherwise."""
        names = {getattr(part, "id", "") or getattr(part, "attr", "") for part in ast.walk(node)}
        self._has_compiler = "numba" in sys.modules or not COMPILERS.isdisjoint(names)
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        """Transform a node, unless it may be compiled otherwise."""
        return node if self._has_compiler and isinstance(node, _Function) else super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Have values that are assigned to parts of arrays seen."""
        targets, value = node.targets, node.value
        values: list[ast.expr] = []
        if len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
            targets, values = targets[0].elts, value.elts  # `p[0], p[1] = s[2], s[3]`
        arrays = [_assigned_array(target) for target in targets]
        self.generic_visit(node)
        if values:
            if len(values) == len(targets):
                values[:] = list(map(self._seen, values, arrays))
        elif all(arrays):
            for array in arrays:
                node.value = self._seen(node.value, array)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Have indices that may be arrays seen."""
        self.generic_visit(node)
        if isinstance(node.slice, ast.Tuple):
            node.slice.elts = list(map(self._seen_index, node.slice.elts))
        else:
            node.slice = self._seen_index(node.slice)
        return node

    def _seen_index(self, index: ast.expr) -> ast.expr:
        if isinstance(index, ast.Name | ast.Attribute | ast.Subscript):
            return _call(seen_value, [index], index)
        return index

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Have arguments of methods seen that plain arrays, generators and files have."""
        self.generic_visit(node)
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in METHODS and (node.args or node.keywords):
            name = ast.copy_location(ast.Constant(method.attr), method)
            node.func = _call(seen_method, [method.value, name], method)
        return node

    def _seen(self, value: ast.expr, array: ast.expr | None) -> ast.expr:
        """Return a call that sees a value for an array, which is computed once more.

        The value may make what the array is taken from, so it comes first, as without a check.
        """
        if array is None or isinstance(value, ast.Constant | ast.Starred):
            return value
        return _call(seen_value, [value, array], value)


def _call(function: Callable[..., Any], arguments: list[ast.expr], place: ast.expr) -> ast.Call:
    """Return a call of a function of this module, which is imported where the code runs."""
    name = function.__name__
    imported = ast.parse(f"__import__({__name__!r}, None, None, [{name!r}]).{name}", mode="eval").body
    for part in ast.walk(imported):
        ast.copy_location(part, place)
    return ast.copy_location(ast.Call(imported, arguments, []), place)


def _assigned_array(target: ast.expr) -> ast.expr | None:
    """Return the array to whose part a value is assigned; None: it is none, or may not be computed twice."""
    simple = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.expr_context)
    if isinstance(target, ast.Subscript) and all(isinstance(x, simple) for x in ast.walk(target.value)):
        return copy.deepcopy(target.value)
    return None


def seen_value(value: Any, *array: Any) -> Any:
    """Return an index, or what is assigned to a part of an array: plain, and read, if it is traced."""
    return seen(value) if not array or type(array[0]) is np.ndarray else value


def seen_method(owner: Any, name: str) -> Callable[..., Any]:
    """Return a method, or one that records what it does with traced arguments."""
    method: Callable[..., Any] = getattr(owner, name)
    if type(owner) is TracedArray or (not isinstance(owner, METHODS[name]) and owner is not np.random):
        return method

    def seen_call(*args: Any, **options: Any) -> Any:
        if not any(True for _ in traced_in((args, options))):
            return method(*args, **options)
        if name == "readinto":
            expose(args[0], name)
            return method(*plain_value(args))
        found = call_recorded(method, "", _PARAMETERS.get(name, ()), args, options)
        if name == "shuffle":
            touch(args[0] if args else options.get("x"), WRITE)
        return found

    return seen_call


class CheckedCell:
    """Records what the user's code of one cell does with shared arrays.

    When the recorder has `LIMIT_NBYTES`, a part of the log is sent at the next operation.
    """

    def __init__(self, cell: ObservedCell) -> None:
        self._cell, self._variables, self._store = cell, cell.variables, sharing.current_store()
        self.recorder = AccessRecorder(self._locate, UserLines(label_function(cell.filename)))
        self._order = OperationOrder(self.recorder, self.send_if_full)
        self.operations = CheckedOperations(cell.communicator, self._order)
        self._originals: dict[int, tuple[Any, Any]] = {}
        """Traced arrays that stand for delivered ones, by identity, with these."""
        self._names: list[ArrayName] = []
        self._notebook_names: list[ArrayName] = []

    def send_if_full(self) -> None:
        """Send a part of the log if what is recorded takes more than `LIMIT_NBYTES`."""
        if self.recorder.nbytes >= LIMIT_NBYTES:
            self._cell.send(self.log())

    def log(self) -> AccessLog:
        """Return what was recorded since the last call."""
        events, self._order.events = tuple(self._order.events), []
        broadcasts, self._order.broadcasts = tuple(self._order.broadcasts), []
        accesses, count = self.recorder.take()
        return AccessLog(
            self._cell.communicator.rank,
            events=events,
            accesses=accesses,
            names=tuple(self._names),
            notebook_names=tuple(self._notebook_names),
            total=count,
            broadcasts=broadcasts,
        )

    def _locate(self, array: np.ndarray[Any, Any]) -> tuple[int, int] | None:
        location = self._store.location(plain(array))
        if location is None:
            return None
        low, _ = extent(array.shape, array.strides, array.itemsize)
        return location.segment, location.start - low

    def trace_names(self) -> None:
        """Bind names of shared arrays that some rank may write to traced arrays over the same memory."""
        traced: dict[int, TracedArray] = {}
        for name, value in list(self._variables.items()):
            if type(value) is TracedArray or not self._may_be_written(value):
                continue
            if id(value) not in traced:
                traced[id(value)] = found = trace(value)
                self._originals[id(found)] = found, value
            self._variables[name] = traced[id(value)]
            self._note_name(name, value)

    def _note_name(self, name: str, array: np.ndarray[Any, Any]) -> None:
        place = self._locate(array)
        if place is None:
            return
        found = ArrayName(name, *place, array.shape, array.strides, array.itemsize)
        own = name in self._variables and not self._cell.is_delivered(name)
        names = self._names if own else self._notebook_names
        if found not in names:
            names.append(found)

    def _may_be_written(self, value: object) -> bool:
        if type(value) is not np.ndarray or not value.size:
            return False
        location = self._store.location(value)
        return location is not None and (location.writable or location.for_all)

    def restore_names(self) -> None:
        """Bind all names to plain arrays again: delivered ones to the very objects that were delivered."""
        for name, value in list(self._variables.items()):
            if type(value) is TracedArray:
                self._note_name(name, value)
                self._variables[name] = self.value(value)

    def value(self, value: Any) -> Any:
        """Return the plain array that a traced one stands for; anything else as it is."""
        if type(value) is not TracedArray:
            return value
        known = self._originals.get(id(value))
        return plain(value) if known is None else known[1]


@contextmanager
def checking(cell: ObservedCell) -> Iterator[CheckedCell]:
    """Record a cell's accesses to shared arrays while the block runs."""
    check, code = CheckedCell(cell), SeenCode()
    cell.transformers.append(code)
    try:
        check.trace_names()
        with check.operations.observing(), recording(check.recorder), doors(check.recorder, cell.variables):
            yield check
    finally:
        check.restore_names()
        if code in cell.transformers:
            cell.transformers.remove(code)
