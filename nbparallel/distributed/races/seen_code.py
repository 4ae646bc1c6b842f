"""Code of a checked cell, with calls where numpy reads or writes a traced array and asks nothing.

::

    private[2:5] = shared[2:5]     private[2:5] = seen_value(shared[2:5], private)
    private[shared]                private[seen_value(shared)]
    private.dot(shared)            seen_method(private, "dot")(shared)
    rng.shuffle(shared)            seen_method(rng, "shuffle")(shared)

A plain array copies from another one, and is indexed by it, within numpy, whatever the other's class.  Code
that was compiled before, in other cells and modules, stays as it is: such accesses in it are not seen.
"""

from __future__ import annotations

import ast
import copy
import io
import sys
from collections.abc import Callable
from socket import socket
from typing import Any

import numpy as np

from nbparallel.distributed.races.access_log import WRITE
from nbparallel.distributed.races.array_methods import expose
from nbparallel.distributed.races.numpy_functions import call_recorded
from nbparallel.distributed.races.traced_array import TracedArray, plain_value, seen, touch, traced_in

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
VALUE_NAME, METHOD_NAME = "__seen_value__", "__seen_method__"
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Later = _Function | ast.GeneratorExp


class SeenCode(ast.NodeTransformer):
    """Puts the calls into the tree of a cell, which then needs `SEEN_NAMES` among its global names.

    A function may run after the cell, and elsewhere: it imports what it calls.  Where something else than
    Python compiles functions, they stay as they are.
    """

    def __init__(self) -> None:
        self._functions = 0
        self._has_compiler = False

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Find out whether functions may be compiled otherwise."""
        names = {getattr(part, "id", "") or getattr(part, "attr", "") for part in ast.walk(node)}
        self._has_compiler = "numba" in sys.modules or not COMPILERS.isdisjoint(names)
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        """Transform a node, and know whether it is in a function."""
        if self._has_compiler and isinstance(node, _Function):
            return node
        later = isinstance(node, _Later)
        self._functions += later
        try:
            return super().visit(node)
        finally:
            self._functions -= later

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
            return self._call(VALUE_NAME, [index], index)
        return index

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Leave types alone."""
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Have arguments of methods seen that plain arrays, generators and files have."""
        self.generic_visit(node)
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in METHODS and (node.args or node.keywords):
            name = ast.copy_location(ast.Constant(method.attr), method)
            node.func = self._call(METHOD_NAME, [method.value, name], method)
        return node

    def _seen(self, value: ast.expr, array: ast.expr | None) -> ast.expr:
        """Return a call that sees a value for an array, which is computed once more.

        The value may make what the array is taken from, so it comes first, as without a check.
        """
        if array is None or isinstance(value, ast.Constant | ast.Starred):
            return value
        return self._call(VALUE_NAME, [value, array], value)

    def _call(self, name: str, arguments: list[ast.expr], place: ast.expr | ast.stmt) -> ast.Call:
        function: ast.expr = ast.Name(name, ast.Load())
        if self._functions:
            function = _imported(SEEN_NAMES[name].__name__)
        call = ast.Call(function, arguments, [])
        for part in ast.walk(function):
            ast.copy_location(part, place)
        return ast.copy_location(call, place)


def _imported(name: str) -> ast.expr:
    """Return what gives a function of this module anywhere."""
    return ast.parse(f"__import__({__name__!r}, None, None, [{name!r}]).{name}", mode="eval").body


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


SEEN_NAMES: dict[str, Any] = {VALUE_NAME: seen_value, METHOD_NAME: seen_method}
"""What transformed code calls."""
