"""CPython's own tests of `concurrent.futures.ProcessPoolExecutor`, also with our `Executor` in its place."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import multiprocessing.util
from pathlib import Path
from typing import Any
from unittest import TestCase, skip

ROOT = Path(__file__).parents[3]
ENDLESS = ("test_force_shutdown_workers", "test_broken_process_pool_traceback")
"""Cases of 3.14 that wait for ever where they do not find the library's private attributes."""
PARTS = ("process_pool", "shutdown", "init", "as_completed", "wait", "deadlock")

_clean_up_theirs = multiprocessing.util._cleanup_tests  # type: ignore[attr-defined]


def _clean_up() -> None:
    """End our fork server with theirs: the folder of both sockets goes, as after each module of cases."""
    gc.collect()  # a case that failed keeps its executor, in a cycle with its traceback
    importlib.import_module("nbparallel.multiprocessing.starting.start_methods").present_server._stop()
    _clean_up_theirs()


def executor_cases(over: str, method: str) -> dict[str, Any]:
    """Return the classes of cases whose workers start with `method`."""
    if over == "ours":  # before the suite, which looks it up at its import
        concurrent.futures.ProcessPoolExecutor = importlib.import_module(  # type: ignore[misc]
            "nbparallel.multiprocessing"
        ).Executor
    suite = "test.test_concurrent_futures"
    mixin = getattr(importlib.import_module(f"{suite}.util"), f"ProcessPool{method.capitalize()}Mixin")
    if over == "ours":  # programs that a case runs do not look at PYTHONPATH
        ours = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from nbparallel.multiprocessing import Executor"
        )
        shutdown = importlib.import_module(f"{suite}.test_shutdown")
        run = shutdown.assert_python_ok
        shutdown.assert_python_ok = lambda option, code: run(
            option, code.replace("from concurrent.futures import Executor", ours)
        )
        multiprocessing.util._cleanup_tests = _clean_up  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for part in PARTS:
        for name, case in vars(importlib.import_module(f"{suite}.test_{part}")).items():
            if isinstance(case, type) and issubclass(case, mixin) and issubclass(case, TestCase):
                found[name] = case
                for endless in ENDLESS:
                    if over == "ours" and hasattr(case, endless):
                        setattr(case, endless, skip("it would wait for ever")(getattr(case, endless)))
    return found
