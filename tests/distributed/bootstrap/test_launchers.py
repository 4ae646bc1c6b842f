"""Other programs' launchers start ranks: torchrun as it is, mpiexec with its variables translated."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import os
import numpy as np
import nbparallel.distributed as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
x = dist.all_reduce(np.full(3, float(rank + 1)))
dist.send(("from", rank), (rank + 1) % size)
got = dist.recv(src=(rank - 1) % size)
dist.destroy_process_group()
os.write(1, f"{rank} of {size}: {x.tolist()} {got}\\n".encode())
"""
SAID = ["0 of 2: [3.0, 3.0, 3.0] ('from', 1)", "1 of 2: [3.0, 3.0, 3.0] ('from', 0)"]
SECONDS = 300.0
"""A generous bound: they end within seconds on a quiet machine."""


def launch(command: list[str], folder: Path, **environment: str) -> list[str]:
    """Run a launcher to its end; return what its ranks have said, sorted."""
    done = subprocess.run(
        command,
        env={**os.environ, "TMPDIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if " of " in line)


@pytest.mark.slow
@pytest.mark.time_limit(400)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: no torchrun")
def test_torchrun(tmp_path: Path) -> None:
    """A script for nbparallel runs under torchrun as it is."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert launch([*torchrun, str(script)], tmp_path) == SAID


@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(400)
@pytest.mark.parametrize(
    ("library", "rank", "size", "options"),
    [
        ("mpich", "PMI_RANK", "PMI_SIZE", []),
        (
            "openmpi",
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            ["--allow-run-as-root", "--oversubscribe"],
        ),
    ],
)
def test_mpiexec(tmp_path: Path, library: str, rank: str, size: str, options: list[str]) -> None:
    """The same script runs under mpiexec, behind a shell that gives it torchrun's variables."""
    mpiexec = Path(sys.prefix) / library / "bin" / "mpiexec"  # where `make bench` installs them
    if not mpiexec.exists():
        pytest.skip(f"{library} is not installed beside this Python: `make bench` does that")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    shell = f'RANK=${rank} WORLD_SIZE=${size} exec "$0" "$1"'
    command = [str(mpiexec), *options, "-n", "2", "sh", "-c", shell, sys.executable, str(script)]
    assert launch(command, tmp_path, MASTER_PORT="29533") == SAID
