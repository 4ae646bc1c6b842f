"""The loader in a notebook: classes of cells, interrupts, restarts."""

from __future__ import annotations

import pytest

from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import Kernel
from tests.multiprocessing.household.family import is_gone

SETUP = """
import os, time
import numpy as np
import nbparallel as nbp, nbparallel.multiprocessing as mp
scale, slow = 2.0, -1

class Squares:
    def __len__(self):
        return 12
    def __getitem__(self, k):
        if k == slow:
            print("slow", flush=True)
            time.sleep(60)
        return np.full(40_000, scale * k * k)

def rows(batches):
    return [b[:, 0].tolist() for b in batches]

loader = mp.DataLoader(Squares(), batch_size=4, num_workers=2)
"""


def ask(kernel: Kernel, code: str) -> str:
    """Run a cell, which must not fail, and return what it printed."""
    outcome = kernel.run(code, timeout=40)
    assert outcome.status == "ok", outcome.traceback
    assert "Traceback" not in outcome.stderr, outcome.stderr
    return outcome.stdout


@pytest.mark.slow
def test_classes_and_functions_of_cells(kernel: Kernel) -> None:
    """They travel by value, also when they are defined anew; `break` and two loops leave no process."""
    ask(kernel, SETUP)
    expected = "[[0.0, 2.0, 8.0, 18.0], [32.0, 50.0, 72.0, 98.0], [128.0, 162.0, 200.0, 242.0]]\n"
    assert ask(kernel, "print(rows(loader))") == expected
    assert ask(kernel, "for b in loader: break\nprint(nbp.is_shared(b), rows(loader)[0][1])") == "True 2.0\n"
    code = "scale = 3.0\nloader = mp.DataLoader(Squares(), 4, num_workers=2)\nprint(rows(loader)[0][1])"
    assert ask(kernel, code) == "3.0\n"
    ask(kernel, "del loader")
    assert ask(kernel, "print(mp.active_children())") == "[]\n"


@pytest.mark.slow
def test_an_interrupt_ends_the_loop_and_no_more(kernel: Kernel) -> None:
    """The loop raises `KeyboardInterrupt`, no worker says a word or is left, the next loop works.

    Persistent workers could be left: an interrupt between two batches takes nothing from them.
    """
    ask(kernel, SETUP)
    for method in ("fork", "forkserver"):
        options = f"4, num_workers=2, persistent_workers=False, start_method={method!r}"
        ask(kernel, f"slow = 5\nloader = mp.DataLoader(Squares(), {options})")
        cell = kernel.begin("for n, b in enumerate(loader):\n    print('batch', n, flush=True)")
        cell.wait_for("batch 0")
        kernel.interrupt()
        outcome = cell.wait(20)
        assert outcome.status == "error"
        assert outcome.ename == "KeyboardInterrupt"
        assert "Traceback" not in outcome.stderr
        assert ask(kernel, "print(mp.active_children())") == "[]\n"
        code = "slow = -1\nprint(len(rows(mp.DataLoader(Squares(), 4, num_workers=2))))"
        assert ask(kernel, code) == "3\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_kernel_that_ends_takes_its_workers_along(kernel: Kernel, how: str) -> None:
    """Restarted or killed in the middle of an iteration."""
    ask(kernel, SETUP)
    ask(kernel, "slow = 5\niteration = iter(mp.DataLoader(Squares(), 4, num_workers=2))\nb = next(iteration)")
    pids = [int(pid) for pid in ask(kernel, "print(*(p.pid for p in mp.active_children()))").split()]
    assert len(pids) == 2
    if how == "restart":
        kernel.restart()
        ask(kernel, SETUP)
        assert ask(kernel, "print(len(rows(loader)))") == "3\n"
    else:
        kernel.kill()
    wait_until(lambda: all(map(is_gone, pids)), "the workers are gone")
