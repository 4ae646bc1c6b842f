"""The oldest `distributed` that the extra allows: cells, a loss, operations over hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(600), pytest.mark.once]
ROOT = Path(__file__).resolve().parents[3]
CHOSEN = [
    "test_dask_sessions.py::test_all_hosts_while_the_client_renews_what_it_knows",
    "test_dask_sessions.py::test_cells_values_output_and_names",
    "test_dask_sessions.py::test_a_killed_worker_is_named_and_replaced",
    "test_dask_operations.py::TestDask::test_random_programs",
]


def test_the_oldest_distributed() -> None:
    """In a run of its own, whose processes all find it first."""
    folder = Path(os.environ.get("NBP_OLD_DISTRIBUTED", Path(sys.prefix) / "distributed-2024.1"))
    if not folder.is_dir():
        pytest.skip(f"distributed 2024.1 is not in {folder}; `make dask` puts it there")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "NBP_PATH": str(folder)}
    ask = [sys.executable, "-c", "import distributed; print(distributed.__version__)"]
    version = subprocess.run(ask, env=environment, capture_output=True, text=True, check=True).stdout
    assert version.startswith("2024.1.")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += [str(ROOT / "tests" / "cluster" / "dask" / name) for name in CHOSEN]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
