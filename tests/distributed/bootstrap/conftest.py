"""Processes that tests start as a launcher would, and what may be left of them: nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbparallel.testing.waiting import wait_until
from tests.distributed.bootstrap.started import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Return what starts processes; afterwards no place and no supervisor may be left."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
    wait_until(lambda: not launcher.supervisors())
    assert launcher.places() == []
