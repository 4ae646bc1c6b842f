"""Code of a checked cell, with calls where numpy reads or writes a traced array and asks nothing.

::

    private[2:5] = shared[2:5]     private[2:5] = seen_value(private, shared[2:5])
    private[shared]                private[seen_value(private, shared)]
    private.dot(shared)            seen_method(private, "dot")(shared)
    rng.shuffle(shared)            seen_method(rng, "shuffle")(shared)

A plain array copies from another one, and is indexed by it, within numpy, whatever the other's class.  Code
that was compiled before, in other cells and modules, stays as it is: such accesses in it are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import WRITE
from nbparallel.distributed.races.recording.numpy_calls.array_methods import expose
from nbparallel.distributed.races.recording.numpy_calls.numpy_functions import (
    call_recorded,
    plain_arguments,
    traced_in,
)
from nbparallel.distributed.races.recording.traced_array import TracedArray, read, seen, touch

ARRAY_METHODS: dict[str, tuple[str, ...]] = {
    "choose": ("a", "choices", "out"), "compress": ("a", "condition", "axis", "out"),
    "dot": ("a", "b", "out"), "put": (), "repeat": (), "searchsorted": (), "setfield": (),
    "take": ("a", "indices", "axis", "out"),
}  # fmt: skip
"""Of a plain array: read what they are passed."""
RANDOM_METHODS = frozenset({
    "choice", "permutation", "permuted", "random", "shuffle", "standard_exponential", "standard_gamma",
    "standard_normal",
})  # fmt: skip
"""Of a generator of random numbers."""
BYTES_METHODS = frozenset({"readinto", "readinto1", "recv_into", "send", "sendall", "write"})
"""Of files and sockets: read, or fill, the bytes that they are passed."""
_METHODS = ARRAY_METHODS.keys() | RANDOM_METHODS | BYTES_METHODS
VALUE_NAME, METHOD_NAME = "__seen_value__", "__seen_method__"
_Later = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.GeneratorExp


class SeenCode(ast.NodeTransformer):
    """Puts the calls into the tree of a cell, which then needs `SEEN_NAMES` among its global names.

    A function may run after the cell, and elsewhere: it imports what it calls.
    """

    def __init__(self) -> None:
        self._functions = 0

    def visit(self, node: ast.AST) -> Any:
        """Transform a node, and know whether it is in a function."""
        later = isinstance(node, _Later)
        self._functions += later
        try:
            return super().visit(node)
        finally:
            self._functions -= later

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Have values that are assigned to parts of arrays seen."""
        self.generic_visit(node)
        if len(node.targets) == 1:
            node.value = self._value_for(node.targets[0], node.value)
        elif all(isinstance(target, ast.Subscript) for target in node.targets):
            for target in node.targets:
                node.value = self._value_for(target, node.value)
        return node

    def _value_for(self, target: ast.expr, value: ast.expr) -> ast.expr:
        if isinstance(target, ast.Subscript) and not isinstance(value, ast.Constant):
            return self._seen(target.value, value)
        if (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
            and not any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts))
        ):
            value.elts = [self._value_for(*pair) for pair in zip(target.elts, value.elts, strict=True)]
        return value

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Have indices that may be arrays seen."""
        self.generic_visit(node)
        if isinstance(node.slice, ast.Name | ast.Attribute | ast.Subscript):
            node.slice = self._seen(node.value, node.slice)
        elif isinstance(node.slice, ast.Tuple):
            node.slice.elts = [
                self._seen(node.value, part)
                if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
                else part
                for part in node.slice.elts
            ]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave types alone."""
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Have arguments of methods seen that plain arrays, generators and files have."""
        self.generic_visit(node)
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in _METHODS and (node.args or node.keywords):
            name = ast.copy_location(ast.Constant(method.attr), method)
            node.func = self._call(METHOD_NAME, [method.value, name], method)
        return node

    def _seen(self, array: ast.expr, value: ast.expr) -> ast.expr:
        """Return a call that sees a value for an array, computed twice; not if that may matter."""
        again = _again(array)
        return value if again is None else self._call(VALUE_NAME, [again, value], value)

    def _call(self, name: str, arguments: list[ast.expr], place: ast.expr) -> ast.Call:
        function: ast.expr = ast.Name(name, ast.Load())
        if self._functions:
            function = _imported(SEEN_NAMES[name].__name__)
        call = ast.Call(function, arguments, [])
        for part in ast.walk(function):
            ast.copy_location(part, place)
        return ast.copy_location(call, place)


def _imported(name: str) -> ast.expr:
    """Return what gives a function of this module anywhere."""
    module = ast.Call(
        ast.Name("__import__", ast.Load()),
        [
            ast.Constant(__name__),
            ast.Constant(None),
            ast.Constant(None),
            ast.List([ast.Constant(name)], ast.Load()),
        ],
        [],
    )
    return ast.Attribute(module, name, ast.Load())


def _is_seen(part: ast.Call) -> bool:
    function = part.func
    return (isinstance(function, ast.Name) and function.id == VALUE_NAME) or (
        isinstance(function, ast.Attribute) and function.attr == seen_value.__name__
    )


def _again(part: ast.expr) -> ast.expr | None:
    """Return names, attributes, and what they index once more, to be read; None: there is more to it."""
    found: ast.expr
    if isinstance(part, ast.Name):
        found = ast.Name(part.id, ast.Load())
    elif isinstance(part, ast.Constant):
        found = ast.Constant(part.value)
    elif isinstance(part, ast.Call) and _is_seen(part):
        return _again(part.args[1])
    elif isinstance(part, ast.Attribute | ast.Subscript):
        value = _again(part.value)
        index = _again(part.slice) if isinstance(part, ast.Subscript) else None
        if value is None or (isinstance(part, ast.Subscript) and index is None):
            return None
        if isinstance(part, ast.Attribute):
            found = ast.Attribute(value, part.attr, ast.Load())
        else:
            assert index is not None
            found = ast.Subscript(value, index, ast.Load())
    else:
        return None
    return ast.copy_location(found, part)


def seen_value(array: Any, value: Any) -> Any:
    """Return what is assigned to a part of an array, or indexes it: plain, and read, if it is traced."""
    if type(array) is np.ndarray:
        return seen(value)
    return value


def seen_method(owner: Any, name: str) -> Callable[..., Any]:
    """Return a method, or one that records what it does with traced arguments first."""
    method: Callable[..., Any] = getattr(owner, name)
    if isinstance(owner, np.ndarray):
        if name not in ARRAY_METHODS or type(owner) is TracedArray:
            return method
        original, parameters = getattr(np.ndarray, name), ARRAY_METHODS[name]

        def of_array(*args: Any, **options: Any) -> Any:
            if any(True for _ in traced_in((args, options))):
                return call_recorded(original, "", parameters, (owner, *args), options)
            return method(*args, **options)

        return of_array
    if name in RANDOM_METHODS and _draws(owner):
        return _of_generator(name, method)
    if name in BYTES_METHODS:

        def of_bytes(*args: Any, **options: Any) -> Any:
            for x in traced_in((args, options)):
                expose(x, name)
            return method(*plain_arguments(args), **options)

        return of_bytes if hasattr(owner, "fileno") or hasattr(owner, "getvalue") else method
    return method


def _draws(owner: Any) -> bool:
    return owner is np.random or isinstance(owner, np.random.Generator | np.random.RandomState)


def _of_generator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **options: Any) -> Any:
        found = method(*plain_arguments(args), **plain_arguments(options))
        out = options.get("out")
        for x in traced_in((args, {key: x for key, x in options.items() if key != "out"})):
            read(x)
        if name == "shuffle":
            touch(args[0] if args else options.get("x"), WRITE)
        if type(out) is TracedArray:
            touch(out, WRITE)
            return out
        return found

    return draw


SEEN_NAMES: dict[str, Any] = {VALUE_NAME: seen_value, METHOD_NAME: seen_method}
"""What transformed code calls."""
