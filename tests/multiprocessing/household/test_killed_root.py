"""A root that is killed while its processes start: they end with it, not when they have loaded everything."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nbparallel.testing.processes import patience

PROGRAM = """
import time
import nbparallel.multiprocessing as mp
if __name__ == "__main__":
    started = [mp.get_context("spawn").Process(target=time.sleep, args=(60,)) for _ in range(12)]
    for process in started: process.start()
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.mark.alone
def test_processes_that_start_end_with_a_killed_root(tmp_path: Path) -> None:
    """Within a second: they have its standard output, which is closed when the last one has ended."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as root:
        assert root.stdout is not None
        assert root.stdout.readline() == b"started\n"
        root.kill()
        killed = time.monotonic()
        root.stdout.read()
        assert time.monotonic() - killed < patience()
