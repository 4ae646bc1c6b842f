"""The import is cheap and changes nothing; the whole API is there."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nbparallel.multiprocessing as mp
from tests.multiprocessing.programs import run_program

MOST_MODULES = 25
"""Twenty-three now; each costs every process that starts."""


AS_THEY_ARE = {
    "dummy", "forkserver", "heap", "popen_fork", "popen_forkserver", "popen_spawn_posix",
    "resource_sharer", "resource_tracker",
}  # fmt: skip
"""The library's own modules, by `mp.NAME` or `from … import NAME`; no file here has their names."""
OTHERS = {"spawn": "torch's function of that name"}


def _library_modules() -> Iterator[tuple[str, ModuleType]]:
    for found in pkgutil.iter_modules(multiprocessing.__path__):
        if "win32" not in found.name and found.name not in OTHERS:
            yield found.name, importlib.import_module(f"multiprocessing.{found.name}")


def test_every_name_is_there() -> None:
    """Names, submodules and classes are the library's or subclasses of them, in each version of it."""
    assert set(multiprocessing.__all__) <= set(mp.__all__)
    for name in mp.__all__:
        assert getattr(mp, name) is not None, name
    for name, library in _library_modules():
        ours = getattr(mp, name)
        for public in vars(library):
            if not public.startswith("_") and not isinstance(getattr(library, public), ModuleType):
                assert hasattr(ours, public), (name, public)
        for public in getattr(library, "__all__", ()):
            if isinstance(getattr(library, public), type):
                assert issubclass(getattr(ours, public), getattr(library, public))
    assert mp.SUBDEBUG == multiprocessing.SUBDEBUG == 5  # type: ignore[attr-defined]
    assert mp.SUBWARNING == multiprocessing.SUBWARNING == 25  # type: ignore[attr-defined]
    assert issubclass(mp.Process, multiprocessing.Process)  # type: ignore[attr-defined]


def test_tab_offers_every_public_name_and_nothing_else() -> None:
    """Those that load on demand as well, such as `Executor`; not the modules that this one imports."""
    assert {name for name in dir(mp) if not name.startswith("__")} == set(mp.__all__)


def test_a_misspelt_name_is_suggested() -> None:
    """As in the other modules of the package."""
    with pytest.raises(AttributeError, match="did you mean 'Queue'"):
        mp.Quue  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="use 'Executor'"):
        mp.ProcessPoolExecutor  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_are_declared() -> None:
    """As the library's own test has it: what is no module and has a public name is in `__all__`."""
    names = {name for name, value in vars(mp).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    foreign = {name for name in names if getattr(vars(mp)[name], "__module__", mp.__name__) != mp.__name__}
    assert names - foreign <= set(mp.__all__)


def test_every_module_can_be_imported_under_our_name() -> None:
    """`import nbparallel.multiprocessing.NAME`, but for the library's own."""
    for name, library in _library_modules():
        if name in AS_THEY_ARE:
            assert getattr(mp, name) is library
        else:
            importlib.import_module(f"nbparallel.multiprocessing.{name}")


@pytest.mark.slow
def test_a_submodule_is_ours_however_it_is_named() -> None:
    """`from … import queues` and `mp.queues` are our module, although nothing has imported it before."""
    for name in ("connection", "managers", "pool", "queues", "context", "sharedctypes"):
        code = (
            f"from nbparallel.multiprocessing import {name} as first\n"
            "import nbparallel.multiprocessing as mp\n"
            f"assert first.__name__ == mp.{name}.__name__ == 'nbparallel.multiprocessing.{name}', first\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_import_changes_nothing() -> None:
    """No default, reducer or registry of the library changes, numpy is not loaded, no process is started."""
    code = """
import multiprocessing as library, multiprocessing.managers, multiprocessing.forkserver, os, sys
import multiprocessing.sharedctypes
def state():
    reducers = dict(library.reduction.ForkingPickler._extra_reducers)
    return (library.context._default_context._actual_context, library.process._children.copy(), reducers,
            list(library.forkserver._forkserver._preload_modules))
before = state()
import nbparallel.multiprocessing as mp
import nbparallel.multiprocessing.pool, nbparallel.multiprocessing.managers
after = state()
assert before[:2] == after[:2] and before[3] == after[3]
added = after[2].keys() - before[2].keys()
assert {kind.__module__.split(".")[0] for kind in added} == {"nbparallel"}, added
assert all(after[2][kind] is before[2][kind] for kind in before[2])
assert "numpy" not in sys.modules
assert not open(f"/proc/self/task/{os.getpid()}/children").read()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_import_loads_little() -> None:
    """A few modules of ours, and of others what types are written with; arrays load the rest.

    How long that takes is a row of `benchmarks.multiprocessing.process_start`.
    """
    code = """
import multiprocessing.pool, multiprocessing.managers, multiprocessing.queues, sys
before = set(sys.modules)
import nbparallel.multiprocessing
print(*(set(sys.modules) - before))
"""
    added = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=30).split()
    parts = {name.split(".")[1] for name in added if name.startswith("nbparallel.")}
    assert parts == {"errors", "multiprocessing"}
    small = {"__future__", "typing", "_typing", "contextvars", "_contextvars"}
    small |= {"annotationlib", "ast", "_ast"}  # by a NamedTuple of CPython 3.15
    assert {name.split(".")[0] for name in added} - {"nbparallel"} <= small
    assert len(added) <= MOST_MODULES, sorted(added)


@pytest.mark.slow
def test_start_methods(tmp_path: Path) -> None:
    """Outside a notebook the default is Python's own; starting a process decides no default."""
    run_program(
        """
        import multiprocessing
        p = mp.get_context("spawn").Process(target=print)
        p.start(); p.join()
        assert multiprocessing.get_start_method(allow_none=True) is None
        assert mp.get_start_method(allow_none=True) is None
        mp.set_start_method("forkserver")
        assert mp.get_start_method() == multiprocessing.get_start_method() == "forkserver"
        mp.set_start_method("forkserver")  # a cell that is run again
        try:
            mp.set_start_method("fork")
        except RuntimeError as error:
            assert "'forkserver'" in str(error) and "set_start_method('fork', force=True)" in str(error)
        else:
            raise AssertionError("it was changed")
        assert mp.get_all_start_methods() == multiprocessing.get_all_start_methods()
        try:
            mp.get_context("other")
        except ValueError as error:
            assert "'other'" in str(error) and "fork, spawn, forkserver" in str(error)
        """,
        tmp_path,
    )
