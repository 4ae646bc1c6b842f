"""Sessions whose ranks have torch and its entry point; everything here is skipped where torch is missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nbparallel as nbp
from nbparallel.testing.waiting import wait_until

ENTRY_POINT = "[torch.backends]\nnbparallel = nbparallel.torch_backend.registration:register\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason in the summary; where torch is, every rank takes seconds to import it."""
    missing = importlib.util.find_spec("torch") is None
    for item in items:
        if "torch_backend" in item.path.parts:
            if missing:
                item.add_marker(pytest.mark.skip(reason="torch is not installed: its backend is not tested"))
            if item.get_closest_marker("time_limit") is None:
                item.add_marker(pytest.mark.time_limit(200))


@pytest.fixture(scope="package")
def entry_point(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give processes torch's entry point, whatever was installed here; return a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "nbparallel_entry-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nbparallel-entry\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    sys.path.append(str(folder))  # the ranks of a session follow it
    yield str(folder)
    sys.path.remove(str(folder))
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def session(entry_point: str) -> Iterator[nbp.Session]:
    """Start two ranks with torch on one thread each."""
    with nbp.Session(2) as started:
        started.run(BEGIN, namespace={})
        yield started


@pytest.fixture(scope="module")
def four(entry_point: str) -> Iterator[nbp.Session]:
    """Start four of them."""
    with nbp.Session(4) as started:
        started.run(BEGIN, namespace={})
        yield started


BEGIN = """
import os
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch
import torch.distributed as td
torch.set_num_threads(1)
"""


@pytest.fixture(scope="session")
def interrupted() -> Callable[[nbp.Session, str], None]:
    """Return a function that runs a cell, and interrupts it when rank 0 waits in an operation for rank 1."""

    def run(session: nbp.Session, cell: str) -> None:
        def interrupt() -> None:
            wait_until(lambda: session.activity().ranks[0].waits_for == (1,), session.activity)
            session.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.run(cell, namespace={})
        thread.join()

    return run


@pytest.fixture(scope="session")
def both() -> Callable[..., None]:
    """Return a function that runs a program over gloo and over our backend, and compares its values.

    Two runs are equal if every rank's value is; tensors in it must have been made bytes.
    """

    def run(session: nbp.Session, program: str, /, **names: Any) -> list[Any]:
        found = []
        for backend in ("gloo", "nbparallel"):
            code = f"td.init_process_group({backend!r})\n{program}"
            found.append(session.run(code, namespace=names).values)
        theirs, ours = found
        assert list(ours) == list(theirs)
        return list(ours)

    return run
