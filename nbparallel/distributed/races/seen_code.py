"""Code of a checked cell, with calls where numpy reads or writes a traced array and asks nothing.

::

    private[2:5] = shared[2:5]     private[2:5] = seen_value(shared[2:5], private)
    private[shared]                private[seen_value(shared, private)]
    private.dot(shared)            seen_method(private, "dot")(shared)
    rng.shuffle(shared)            seen_method(rng, "shuffle")(shared)

A plain array copies from another one, and is indexed by it, within numpy, whatever the other's class.  Code
that was compiled before, in other cells and modules, stays as it is: such accesses in it are not seen.  So
do functions that something else than Python compiles, as numba: it knows none of these calls.
"""

from __future__ import annotations

import ast
import copy
import gc
import io
from collections.abc import Callable, Iterator
from socket import socket
from types import CodeType, FunctionType
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
    "cfunc", "compile", "generated_jit", "guvectorize", "jit", "njit", "script", "stencil", "vectorize",
})  # fmt: skip
"""Of numba, torch and others: compile the functions that they are passed; `numpy.vectorize` does not."""
VALUE_NAME, METHOD_NAME = "__seen_value__", "__seen_method__"
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Later = _Function | ast.GeneratorExp


class SeenCode(ast.NodeTransformer):
    """Puts the calls into the tree of a cell, which then needs `SEEN_NAMES` among its global names.

    A function may run after the cell, and elsewhere: it imports what it calls.  At the end of the cell
    `restore_functions` takes the calls out of those that are still there.
    """

    def __init__(self) -> None:
        self._functions = 0
        self._compiled: set[str] = set()
        """Names of functions of this cell that something else compiles."""
        self._trees: list[tuple[ast.Module, ast.AST]] = []
        """Cells with functions, as they were and as they are now."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Keep a cell that has functions as it was."""
        parts = list(ast.walk(node))
        self._compiled = {name for part in parts if isinstance(part, ast.Call) for name in _compiled(part)}
        plain = copy.deepcopy(node) if any(isinstance(part, _Function) for part in parts) else None
        self.generic_visit(node)
        if plain is not None:
            self._trees.append((plain, node))
        return node

    def restore_functions(self, flags: int) -> None:
        """Give the functions that the cell has made, and left, the code that they have without a check.

        `flags` are the compiler's.
        """
        plain_code: dict[tuple[object, ...], CodeType] = {}
        for trees in self._trees:
            modules: list[Any] = [ast.fix_missing_locations(tree) for tree in trees]
            try:
                plain, with_calls = (
                    _functions_in(compile(module, "<cell>", "exec", flags, True)) for module in modules
                )
            except SyntaxError:  # as `return` outside of a function: it did not run
                continue
            plain_code |= {
                _contents(code): before
                for before, code in zip(plain, with_calls, strict=False)
                if _contents(before) != _contents(code) and before.co_freevars == code.co_freevars
            }
        self._trees.clear()
        lines = {contents[:2] for contents in plain_code}
        for function in gc.get_objects() if plain_code else ():
            if type(function) is not FunctionType:
                continue
            code = function.__code__
            if (code.co_name, code.co_firstlineno) in lines:  # else a library's: there are 100,000
                before = plain_code.get(_contents(code))
                if before is not None:
                    function.__code__ = before.replace(co_filename=code.co_filename)

    def visit(self, node: ast.AST) -> Any:
        """Transform a node, and know whether it is in a function; leave what is compiled otherwise."""
        if self._is_compiled(node):
            return node
        later = isinstance(node, _Later)
        self._functions += later
        try:
            return super().visit(node)
        finally:
            self._functions -= later

    def _is_compiled(self, node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef) and (
            node.name in self._compiled or any(map(_is_compiler, node.decorator_list))
        )

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
        if _is_compiler(node.func) and any(isinstance(part, ast.Lambda) for part in node.args):
            return node
        self.generic_visit(node)
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr in METHODS and (node.args or node.keywords):
            name = ast.copy_location(ast.Constant(method.attr), method)
            node.func = self._call(METHOD_NAME, [method.value, name], method)
        return node

    def _seen(self, array: ast.expr, value: ast.expr) -> ast.expr:
        """Return a call that sees a value for an array, which is computed once more; not if that may matter.

        The value may make what the array is taken from, so it comes first, as without a check.
        """
        again = _again(array)
        return value if again is None else self._call(VALUE_NAME, [value, again], value)

    def _call(self, name: str, arguments: list[ast.expr], place: ast.expr | ast.stmt) -> ast.Call:
        function: ast.expr = ast.Name(name, ast.Load())
        if self._functions:
            function = _imported(SEEN_NAMES[name].__name__)
        call = ast.Call(function, arguments, [])
        for part in ast.walk(function):
            ast.copy_location(part, place)
        return ast.copy_location(call, place)


def _is_compiler(part: ast.expr) -> bool:
    """Whether it is `numba.njit`, `njit` or `njit(parallel=True)`."""
    if isinstance(part, ast.Call):
        return _is_compiler(part.func)
    if isinstance(part, ast.Attribute):
        owner = part.value.id if isinstance(part.value, ast.Name) else ""
        return part.attr in COMPILERS and owner not in ("np", "numpy")
    return isinstance(part, ast.Name) and part.id in COMPILERS


def _compiled(call: ast.Call) -> Iterator[str]:
    """Yield the names of functions that a call compiles."""
    if _is_compiler(call.func):
        for argument in call.args:
            if isinstance(argument, ast.Name):
                yield argument.id


def _functions_in(code: CodeType) -> list[CodeType]:
    """Return the code of all functions within a piece of code, and within these, in order."""
    found = []
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found += [part, *_functions_in(part)]
    return found


def _contents(code: CodeType) -> tuple[object, ...]:
    """Return what two codes have alike that were compiled from the same lines; they need not be equal."""
    constants = tuple(
        _contents(part) if isinstance(part, CodeType) else (type(part), part) for part in code.co_consts
    )
    return code.co_name, code.co_firstlineno, code.co_linetable, code.co_code, code.co_names, constants


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
        return _again(part.args[0])
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


def seen_value(value: Any, array: Any) -> Any:
    """Return what is assigned to a part of an array, or indexes it: plain, and read, if it is traced."""
    if type(array) is np.ndarray:
        return seen(value)
    return value


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
