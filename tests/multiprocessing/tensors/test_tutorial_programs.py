"""The tutorials' programs run as scripts, with each start method, and in a notebook, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.kernel import Kernel
from tests.multiprocessing.programs import run_program
from tests.multiprocessing.tensors.tutorials import IMPORTS, PROGRAMS
from tests.sharing.tensors.optional import needs_torch

pytestmark = [needs_torch, pytest.mark.slow, pytest.mark.time_limit(120)]


@pytest.mark.matrix(cover=("method",), size=3)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_a_script(tmp_path: Path, method: str, program: str) -> None:
    """It says nothing, fails nowhere, and its processes are those of the chosen start method."""
    chosen = f"mp.set_start_method({method!r}, force=True)\n"
    guard = 'if __name__ != "__main__":\n    raise SystemExit("the script was run again")\n'
    run_program(guard + IMPORTS + chosen + PROGRAMS[program], tmp_path, method, limit=100)


def test_in_a_notebook(kernel: Kernel) -> None:
    """Each runs as a cell, one after the other, with the start method that a notebook has."""
    # otherwise each of its processes imports torch, which takes two seconds
    assert kernel.run(IMPORTS + "mp.set_forkserver_preload(['torch'])").status == "ok"
    for name, program in PROGRAMS.items():
        outcome = kernel.run(program, 100)
        assert (outcome.status, outcome.stdout, outcome.stderr) == ("ok", "", ""), (name, outcome)
    assert kernel.run("print(mp.active_children())").stdout == "[]\n"
