"""Paths and module names in pages and docstrings are those of the tree as it is."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

from tests.architecture.source_tree import ROOT, TREE

HISTORY = re.compile(r"docs/dev/decisions/")  # true when they were written
PATH = re.compile(r"(?<![\w/.])(?:nbparallel|magics|widgets|tests|benchmarks|docs|notebooks)/[\w./-]*\w")
NAME = re.compile(r"`+(nbparallel(?:_magics|_widgets)?(?:\.\w+)+)`+")


def texts() -> Iterator[tuple[str, str]]:
    """Yield (where, text) of each page, and of each docstring of the library."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changes").glob("*.md")]:
        name = page.relative_to(ROOT).as_posix()
        if not HISTORY.match(name) and name != "CHANGELOG.md":
            yield name, page.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in TREE.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                yield f"{module}, {getattr(node, 'name', 'the module')}", text


def exists(name: str) -> bool:
    """Return whether a dotted name is a module of ours, or an attribute of one."""
    module, attributes = name, []
    while module not in TREE.modules:
        module, _, last = module.rpartition(".")
        attributes.insert(0, last)
    thing = importlib.import_module(module)
    for attribute in attributes:
        if not hasattr(thing, attribute):
            return False
        thing = getattr(thing, attribute)
    return True


def test_paths_exist() -> None:
    """A path that begins in one of the repository's folders leads somewhere."""
    found = [(where, path) for where, text in texts() for path in PATH.findall(text)]
    assert len(found) > 10
    wrong = [f"{where}: {path}" for where, path in found if not (ROOT / path).exists()]
    assert not wrong, "\n".join(wrong)


def test_dotted_names_exist() -> None:
    """A full name of ours in backticks can be imported."""
    found = [(where, name) for where, text in texts() for name in NAME.findall(text)]
    assert len(found) > 20
    wrong = [f"{where}: {name}" for where, name in found if not exists(name)]
    assert not wrong, "\n".join(wrong)


def test_the_layout_is_complete() -> None:
    """The tree in the code map shows every room of the library, and none that is not there."""
    tree = (ROOT / "docs/dev/code-map.md").read_text().split("## Layout")[1].split("```")[1]
    shown = set(re.findall(r"(\w+)/(?=\s)", tree)) - {"tests", "benchmarks"}
    assert shown == {name.rpartition(".")[2] for name in TREE.packages}
