"""F4: nobody can be killed holding a lock that others wait for, since there is none between processes."""

from __future__ import annotations

import ast
from pathlib import Path

import nbparallel

FORBIDDEN_MODULES = frozenset({"multiprocessing", "_multiprocessing", "_posixshmem", "posix_ipc", "sysv_ipc"})
ALLOWED_MODULES = frozenset({"multiprocessing.process", "multiprocessing.util"})
"""What is called when a process ends; it has no locks between processes."""
FORBIDDEN_CALLS = ("sem_open", "sem_init", "pthread_mutex", "lockf", "F_SETLKW")
"""Locks that stay locked when their holder is killed, or that are waited for without an end."""


def used(path: Path) -> set[str]:
    """Return which of them a source file imports or calls, by whatever name it got them."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module in ALLOWED_MODULES:
                continue
            found |= {node.module.partition(".")[0]} & FORBIDDEN_MODULES
        elif isinstance(node, ast.Attribute | ast.Constant):
            word = node.attr if isinstance(node, ast.Attribute) else node.value
            if isinstance(word, str) and len(word) < 40:  # no docstring
                found |= {call for call in FORBIDDEN_CALLS if call in word}
    return found


def test_f4_no_lock_lies_between_processes(tmp_path: Path) -> None:
    """No source file uses a semaphore or mutex of several processes: waits look at who lives instead."""
    package = Path(nbparallel.__file__).parent
    files = [path for path in package.rglob("*.py") if "multiprocessing" not in path.parts]
    assert len(files) > 150
    assert {str(path): names for path in files if (names := used(path))} == {}
    (tmp_path / "bad.py").write_text("from multiprocessing import Lock\nlibc.sem_open(b'x')\n")
    assert used(tmp_path / "bad.py") == {"multiprocessing", "sem_open"}, "the test would see one"
