"""A process that is killed on the way of a message leaves nothing, and costs no more than that message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocessing.messages import kill_rounds

ROOT = Path(kill_rounds.__file__).parents[3]


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(27, marks=pytest.mark.slow),
        pytest.param(216, marks=[pytest.mark.stress, pytest.mark.time_limit(400)]),
    ],
)
def test_killed_on_the_way(rounds: int, method: str, request: pytest.FixtureRequest) -> None:
    """Each point × producer and consumer: no segment, name, process or descriptor stays; others receive."""
    number = request.config.option.seed
    command = [sys.executable, "-m", kill_rounds.__name__, method, str(rounds), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    assert sum(int(line.split()[0]) for line in done.stdout.splitlines()) == rounds
