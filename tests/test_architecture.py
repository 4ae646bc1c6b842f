"""The house keeps its shape: small files, documented names, nothing forbidden between processes."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("nbparallel", "magics/nbparallel_magics", "widgets/nbparallel_widgets")
    for path in (ROOT / folder).rglob("*.py")
)
MAX_LINES = 400
FORBIDDEN = {
    "multiprocessing.shared_memory": "its tracker leaks names and removes others' segments",
    "multiprocessing.resource_tracker": "it is shared by unrelated processes",
    "multiprocessing.managers": "a server process and a socket that listens",
    "socketserver": "nothing of ours listens",
}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_sources_were_found() -> None:
    """The checks below look at the package, not at an empty folder."""
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_file_holds_one_idea(path: Path) -> None:
    """No source file is longer than 400 lines."""
    assert len(path.read_text().splitlines()) <= MAX_LINES, "split it"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_forbidden_between_processes(path: Path) -> None:
    """No module imports what leaks or listens, and no wait reads the wall clock."""
    tree = ast.parse(path.read_text())
    found = {name: FORBIDDEN[name] for name in _imports(tree) if name in FORBIDDEN}
    assert not found
    clock = [node.lineno for node in ast.walk(tree) if ast.unparse(node) == "time.time()"]
    assert not clock, f"lines {clock}: waits and spans use time.monotonic(), which no clock jump moves"


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=_name)
def test_public_names_exist_and_are_documented(path: Path) -> None:
    """Every name in `__all__` can be had and says what it does."""
    parts = list(path.parent.relative_to(ROOT).parts)
    module = importlib.import_module(".".join(parts[1:] if parts[0] in ("magics", "widgets") else parts))
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), f"{module.__name__}.{name} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_sizes_have_one_spelling(path: Path) -> None:
    """What users read counts bytes in KiB, MiB and GiB (`wire.units`), never sometimes in MB."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = [n.lineno for n in texts if id(n) not in prose and re.search(r"\b[KMGT]B\b", n.value)]
    assert not found, f"lines {found}"


def test_import_is_cheap() -> None:
    """`import nbparallel` loads neither numpy nor a notebook library: attributes load on demand."""
    code = "import sys, nbparallel; print(*{'numpy', 'IPython', 'zmq', 'traitlets'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15
    )
    assert done.stdout.strip() == ""
