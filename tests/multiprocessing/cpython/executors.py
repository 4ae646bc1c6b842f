"""CPython's own tests of `concurrent.futures.ProcessPoolExecutor`, also with our `Executor` in its place."""

from __future__ import annotations

import concurrent.futures
import importlib
from pathlib import Path
from typing import Any
from unittest import TestCase

ROOT = Path(__file__).parents[3]
PARTS = ("process_pool", "shutdown", "init", "as_completed", "wait", "deadlock")


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
    found: dict[str, Any] = {}
    for part in PARTS:
        for name, case in vars(importlib.import_module(f"{suite}.test_{part}")).items():
            if isinstance(case, type) and issubclass(case, mixin) and issubclass(case, TestCase):
                found[name] = case
    return found
