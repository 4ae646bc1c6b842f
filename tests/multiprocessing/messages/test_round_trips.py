"""Any tree of arrays, by any carrier: it comes back as what it was, and lies in memory as decided."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocessing.messages import round_trips

ROOT = Path(round_trips.__file__).parents[3]
EXAMPLES = 25
"""Trees by each carrier; `python -m tests.multiprocessing.messages.round_trips` takes more."""


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_every_tree_comes_back(method: str, request: pytest.FixtureRequest) -> None:
    """Shared arrays come back as the same memory with their rights, private ones as copies; views alias.

    Views, strides, 0-d, empty, structured, object, read-only arrays, Fortran order; queues of all kinds,
    pipes, pools, managers, arguments of processes.
    """
    number = request.config.option.seed
    command = [sys.executable, "-m", round_trips.__name__, method, str(EXAMPLES), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    assert len(done.stdout.split()) == len(round_trips.CARRIERS)
