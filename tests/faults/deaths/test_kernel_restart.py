"""A real kernel that is restarted, shut down, killed or left, with ranks in every state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbparallel.testing.processes import ProcessRecord
from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import Kernel
from tests.harness.kernel.kernel_fixtures import old_ipykernel
from tests.harness.turns import Promised

START = """
%load_ext nbparallel
import nbparallel
"""
FIRST = """%%parallel -n 3 -o pids
import os, time, ctypes
os.getpid()
"""
LOADED = "only loaded"
"""What the extension starts in the background then; there are no ranks."""
STATES = {
    LOADED: "",
    "idle": "",
    "computing": "%%parallel\nprint('busy')\nwhile True: pass",
    "in all_reduce": "%%parallel\nprint('busy', flush=True)\nall_reduce(1) if rank else time.sleep(100)",
    "holding the GIL in C": "%%parallel\nprint('busy', flush=True)\nctypes.PyDLL(None).sleep(100)",
}


def begin(kernel: Kernel, state: str) -> None:
    """Bring the ranks of a kernel into a state."""
    for code in [START] if state == LOADED else [START, FIRST]:
        outcome = kernel.run(code)
        assert outcome.status == "ok", outcome
    if STATES[state]:
        kernel.begin(STATES[state]).wait_for("busy")


def wait_until_alone(kernel: Kernel, but: int) -> None:
    """Fail unless every process below the kernel, and every former one, is gone."""

    def left() -> list[ProcessRecord]:
        return [record for record in kernel.descendants() if record.pid != but]

    wait_until(lambda: not left(), left)


@pytest.mark.slow
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("now", [False, True])
def test_f12_restarting_a_kernel_leaves_no_old_group(now: bool, promised: Promised) -> None:
    """Again and again, with ranks in an endless loop: the new kernel has no process of the old one."""
    with Kernel() as kernel:
        for state in ("computing", LOADED, "idle", "holding the GIL in C"):
            begin(kernel, state)
            assert kernel.descendants()
            kernel.restart(now=now or state not in ("idle", LOADED))
            with promised(2.0):
                wait_until_alone(kernel, kernel.pid)
        assert kernel.run("1 + 1").status == "ok"


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("state", STATES)
def test_f10_a_killed_kernel_leaves_nothing(state: str, promised: Promised) -> None:
    """Kill -9 of the kernel, in every state of its ranks."""
    with Kernel() as kernel:
        begin(kernel, state)
        assert kernel.descendants()
        kernel.kill()
        with promised(2.0):
            wait_until_alone(kernel, -1)


@pytest.mark.slow
def test_f10_and_so_does_a_killed_kernel_of_an_older_ipykernel() -> None:
    """The same with 6.31, whose kernel runs cells, threads and signals in another way; states in a row."""
    folder = old_ipykernel()
    if not folder.is_dir():
        pytest.skip(f"ipykernel 6.31 is not in {folder}; `make test` puts it there")
    with Kernel(path=[folder]) as kernel:
        assert kernel.run("import ipykernel; ipykernel.__version__[:4]").result == "'6.31'"
        for state in ("idle", "in all_reduce"):  # the kernel waits for the next cell, and in one
            if not kernel.alive:
                kernel.restart(now=True)
            begin(kernel, state)
            assert kernel.descendants()
            kernel.kill()
            wait_until_alone(kernel, -1)


@pytest.mark.slow
def test_f13_exit_in_a_cell_ends_everything() -> None:
    """``exit()`` while ranks are there: kernel and ranks are gone."""
    with Kernel() as kernel:
        begin(kernel, "idle")
        kernel.begin("exit()")
        wait_until(lambda: not kernel.alive)
        wait_until_alone(kernel, -1)


@pytest.mark.slow
def test_f71_two_kernels_do_not_touch_each_other() -> None:
    """One kernel is killed; the other's ranks go on."""
    with Kernel() as first, Kernel() as second:
        begin(first, "computing")
        begin(second, "idle")
        first.kill()
        wait_until_alone(first, -1)
        outcome = second.run("%%parallel -o now\nos.getpid()")
        assert outcome.status == "ok"
        assert second.run("assert list(now) == list(pids)").status == "ok"


@pytest.mark.slow
def test_an_array_in_a_file_survives_a_restart(tmp_path: Path) -> None:
    """What ranks wrote into a file is there for the next kernel and its ranks, also after a kill."""
    opened = f"import nbparallel as nbp\nx = nbp.from_file({str(tmp_path / 'x.npy')!r}"
    with Kernel() as kernel:
        assert kernel.run(f"%load_ext nbparallel\n{opened}, float, (3, 1000), 'w+')").status == "ok"
        assert kernel.run("%%parallel -n 3\nx[rank] = rank + 1").status == "ok"
        for now in (False, True):
            kernel.restart(now=now)
            wait_until_alone(kernel, kernel.pid)
            assert kernel.run(f"%load_ext nbparallel\n{opened}, mode='r+')").status == "ok"
            assert kernel.run("assert x.sum() == 6000, x").status == "ok"
            assert kernel.run("%%parallel -n 2\nassert x.sum() == 6000\nbarrier()").status == "ok"
    assert sorted(os.listdir(tmp_path)) == ["x.npy"]
