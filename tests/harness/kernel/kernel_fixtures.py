"""Fixtures with a kernel process: ``kernel``, ``any_kernel`` and, for a whole module, ``shared_kernel``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbparallel.testing.plugin import failed
from tests.harness.kernel import Kernel


def old_ipykernel() -> Path:
    """Return the folder of the older ipykernel that tests also run with.

    ``pip install --target FOLDER --no-deps ipykernel==6.31.0`` makes it; the Makefile does.
    """
    return Path(os.environ.get("NBP_OLD_IPYKERNEL", Path(sys.prefix) / "ipykernel-6.31"))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Start a fresh kernel process of the installed ipykernel."""
    with Kernel() as fresh:
        yield fresh


def _path_of(ipykernel: str) -> list[Path]:
    folder = old_ipykernel()
    if ipykernel != "installed" and not folder.is_dir():
        pytest.skip(f"ipykernel 6.31 is not in {folder}; `make test` puts it there")
    return [] if ipykernel == "installed" else [folder]


@pytest.fixture(params=["installed", "6.31"])
def any_kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Start a fresh kernel process, once of the installed ipykernel and once of 6.31."""
    with Kernel(path=_path_of(request.param)) as fresh:
        yield fresh


@pytest.fixture(scope="module", params=["installed", "6.31"])
def module_kernel(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[Kernel]]]:
    """Start one kernel process for a module, of each ipykernel; its list is empty once it is of no use."""
    with Kernel(path=_path_of(request.param)) as kernel:
        yield request.param, [kernel]


@pytest.fixture
def shared_kernel(
    request: pytest.FixtureRequest, module_kernel: tuple[str, list[Kernel]]
) -> Iterator[Kernel]:
    """Return the module's kernel of each ipykernel, reset after every test; for tests that do not end it."""
    ipykernel, usable = module_kernel
    if not usable:
        with Kernel(path=_path_of(ipykernel)) as fresh:
            yield fresh
        return
    yield usable[0]
    if request.node.stash.get(failed, False):
        usable.clear()
    else:
        usable[0].reset()
