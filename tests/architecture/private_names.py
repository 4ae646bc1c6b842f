"""Where tests reach into private attributes of the library, in their own code and in programs that they run.

A name counts as the library's if it defines one like it, so that a test's own private names, and those of
other libraries, are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.architecture.programs import program, texts
from tests.architecture.source_tree import PACKAGES, SourceTree

OURS = {*PACKAGES, "benchmarks"}
"""Packages whose private names tests may not use."""
SUSPECT = re.compile(r"""\._[A-Za-z]|["']_[A-Za-z]|\bimport _|, _[A-Za-z]""")
"""What a text holds that reaches into something; a text without is not parsed."""
_NAMED = re.compile(r"^\s*(?:async )?(?:def|class) (_\w+)", re.MULTILINE)
_TARGETS = re.compile(r"^ *(?:[^\s=(\"'#][^=(\"'#\n]*? = )+", re.MULTILINE)
"""What a line assigns to."""
_ATTRIBUTE = re.compile(r"\b(?:self|cls)\.(_\w+)(?=,| =|: )|^ {0,4}(_\w+)(?=,| =|: )")
_OF_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
"""Public, although they begin as private names (`collections.namedtuple`)."""
_REACHED = re.compile(r"(?<!self)(?<!cls)\.(_[A-Za-z]\w*)")
_DOTTED = re.compile(r"\w+(\.\w+)+")


def is_private(name: str) -> bool:
    """Tell whether a name begins as private ones do, and is none of Python's or IPython's protocols."""
    return name.startswith("_") and not name.endswith("_") and name not in _OF_TUPLES


def private_names(tree: SourceTree) -> frozenset[str]:
    """Return the private names that the library's modules define, and their own names."""
    names = {name for path in tree.modules.values() for name in defined(path.read_text())}
    return frozenset(names | {n for m in tree.modules if is_private(n := m.rpartition(".")[2])})


def defined(text: str) -> set[str]:
    """Return the private names that a text defines: at top level, in classes, on ``self``."""
    assigned = (found for line in _TARGETS.findall(text) for found in _ATTRIBUTE.findall(line))
    names = {*_NAMED.findall(text), *(name for found in assigned for name in found)}
    return set(filter(is_private, names))


def reached_names(text: str, names: frozenset[str]) -> list[tuple[int, str]]:
    """Return lines and names where a test's source, or a program in it, uses one of the private `names`."""
    if not SUSPECT.search(text):
        return []
    tree = ast.parse(text)
    own = defined(text)
    found = set(_in_code(tree, names, own))
    for line, part in texts(tree):
        if part in names or SUSPECT.search(part) or _DOTTED.fullmatch(part):
            found |= {(line, name) for name in _in_text(part, names, own | defined(part))}
    return sorted(found)


def _in_text(text: str, names: frozenset[str], own: set[str]) -> Iterable[str]:
    if _DOTTED.fullmatch(text):  # of what is replaced, for example
        first, *others = text.split(".")
        return [name for name in others if is_private(name)] if first in OURS else []
    if text in names:
        return {text} - own
    if (tree := program(text)) is None:
        return {name for name in _REACHED.findall(text) if name in names} - own
    return {name for _, name in _in_code(tree, names, own)}


def _in_code(tree: ast.AST, names: frozenset[str], own: set[str]) -> Iterator[tuple[int, str]]:
    foreign = set(_imported_from_others(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            root = _root(node)
            if root not in foreign and not (root in ("self", "cls") and node.attr in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, name) for name in parts if is_private(name))


def _imported_from_others(tree: ast.AST) -> Iterator[str]:
    """Yield the names that stand for modules, or parts of them, of other libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] not in OURS
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in {
            *OURS,
            "tests",
        }:
            yield from (alias.asname or alias.name for alias in node.names)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
