"""What of the library's is written again here, or called by names of its inside: each text was looked at."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import nbparallel.multiprocessing as mp

KNOWN = {
    "multiprocessing.connection.Connection._close": {"b7075b5f7eb7"},
    "multiprocessing.pool.Pool._help_stuff_finish": {"3b5834eee960"},
    "multiprocessing.pool.Pool._setup_queues": {"93a5b1107bfd"},
    "multiprocessing.popen_forkserver.Popen._launch": {"68a951398cdc"},
    "multiprocessing.popen_spawn_posix.Popen._launch": {"3fcd3c877c17", "52a575fcf945"},
    "multiprocessing.queues.Queue._feed": {"a294238f3f78"},
    "multiprocessing.queues.Queue._start_thread": {"a96ed302fe89", "5306a29d6b84"},
    "multiprocessing.spawn.get_preparation_data": {"480422034ee4", "5c3d5066f936"},
}  # fmt: skip
"""Digests of the texts of CPython 3.11 to 3.14, without white space: a new one is read before it is added."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_function_of_the_library_is_known(name: str) -> None:
    """A newer CPython's text was compared with ours: since 3.13 a copy of `_launch` had lost messages."""
    text = "".join(inspect.getsource(pkgutil.resolve_name(name)).split())
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert digest in KNOWN[name], f"look at what changed in {name}, then add {digest!r}"


def _overridden() -> Iterator[tuple[str, Any, Any]]:
    """Return each method of ours that stands in the place of one of the library's, and that one."""
    for found in pkgutil.walk_packages(mp.__path__, f"{mp.__name__}."):
        if "joblib" in found.name or "torch" in found.name:
            continue
        module = importlib.import_module(found.name)
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != found.name:
                continue
            for name, method in vars(kind).items():
                owner = next((base for base in kind.__mro__[1:] if name in vars(base)), None)
                if owner is not None and owner.__module__.partition(".")[0] in (
                    "multiprocessing",
                    "concurrent",
                ):
                    theirs = vars(owner)[name]
                    methods = [getattr(function, "__func__", function) for function in (method, theirs)]
                    if name != "__init__" and all(map(inspect.isfunction, methods)):
                        yield f"{kind.__module__}.{kind.__name__}.{name}", *methods


def test_methods_take_what_the_librarys_take() -> None:
    """Since 3.14 `terminate_broken` has one more argument; without it, calls waited for ever."""
    seen = list(_overridden())
    assert len(seen) > 30
    for name, ours, theirs in seen:
        own, given = (list(inspect.signature(method).parameters.values()) for method in (ours, theirs))
        kinds = {each.kind for each in own}
        by_place = [
            [each for each in some if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
            for some in (own, given)
        ]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            assert len(by_place[0]) >= len(by_place[1]), (name, own, given)
        if inspect.Parameter.VAR_KEYWORD not in kinds and not name.rpartition(".")[2].startswith("_"):
            named = {
                each.name for each in given if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
            }
            assert named <= {each.name for each in own}, (name, own, given)
