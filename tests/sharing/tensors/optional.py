"""Libraries that need not be installed: tests that need one are skipped where it is missing, and say so."""

import importlib
import importlib.util

import pytest


def _mark(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


needs_torch, needs_ml_dtypes = _mark("torch"), _mark("ml_dtypes")
torchs_threads = pytest.mark.may_leave("thread", reason="torch starts its pool of threads with its first sum")


class _Lazy:
    """torch, imported by the first test that uses it."""

    def __getattr__(self, name):
        return getattr(importlib.import_module("torch"), name)


torch = _Lazy()


class Exporter:
    """An array of another library, as far as DLPack shows it."""

    def __init__(self, array, device=1):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self.device, 0)
