"""Which names a cell may change in place: read off its syntax, not certain."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class ChangedNames(NamedTuple):
    """Names by how a cell may change what they are bound to."""

    stored: frozenset[str]
    """It assigns to items or attributes: ``d["a"].b = 1``, ``del d[0]``."""
    called: frozenset[str]
    """It calls a method: ``d.append(1)``."""
    augmented: frozenset[str]
    """It assigns as ``d += 1`` does, and in no other way."""
    deleted: frozenset[str]
    """It deletes the name, and does not bind it."""
    rebound: frozenset[str]
    """It assigns a new value wherever it succeeds: ``d = 1``, outside of branches and loops."""


def find_changes(tree: ast.Module) -> ChangedNames:
    """Return the names that a cell may change in place; those of its functions count as globals."""
    stored: set[str] = set()
    called: set[str] = set()
    augmented: set[str] = set()
    bound: set[str] = set()
    deleted: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                stored.add(_root(node))
            case ast.Call(func=ast.Attribute() as method):
                called.add(_root(method))
            case ast.AugAssign(target=ast.Name(id=name) as target):
                augmented.add(name)
                target.ctx = _AUGMENTED
            case ast.Name(id=name, ctx=ast.Store()) if node.ctx is not _AUGMENTED:
                bound.add(name)
            case ast.Name(id=name, ctx=ast.Del()):
                deleted.add(name)
    return ChangedNames(
        frozenset(stored),
        frozenset(called - stored),
        frozenset(augmented - bound),
        frozenset(deleted - bound - augmented),
        frozenset(_rebound(tree.body)),
    )


_AUGMENTED = ast.Store()


def _rebound(statements: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        match statement:
            case ast.Assign(targets=targets):
                yield from _bound_by(targets)
            case ast.AnnAssign(target=target, value=ast.expr()):
                yield from _bound_by([target])
            case ast.With(body=body):
                yield from _rebound(body)


def _bound_by(targets: Iterable[ast.expr]) -> Iterator[str]:
    for target in targets:
        match target:
            case ast.Name(id=name):
                yield name
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                yield from _bound_by(parts)
            case ast.Starred(value=part):
                yield from _bound_by([part])


def _root(node: ast.expr) -> str:
    """Return the name that a chain of attributes and items begins with; empty: it begins with no name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
