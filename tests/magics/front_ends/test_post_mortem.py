"""``%debug`` after a cell that failed on ranks, in a real kernel: on the rank that failed, without a hang."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

import pytest

from tests.harness.kernel import CellOutcome, Kernel
from tests.magics.cells import printed, with_ranks

pytestmark = pytest.mark.time_limit(90)

FAILS = "%%parallel\nbarrier()\nz = half(rank)\nbarrier()"


def with_failure(kernel: Kernel) -> Kernel:
    """Have rank 1 of two fail in a function of the notebook while the other waits for it."""
    with_ranks(kernel)
    kernel.run("def half(x):\n    y = x * 2\n    return y / (1 - x)")
    assert kernel.run(FAILS).ename == "ParallelError"
    return kernel


def debug(
    kernel: Kernel, code: str, commands: Sequence[str | Callable[[], object]], rank: int = 1
) -> CellOutcome:
    """Run a cell that asks for just these commands; of functions the last ends it."""
    cell = kernel.begin(code, allow_stdin=True)
    for command in commands:
        assert kernel.question() == (f"[rank {rank}] (Pdb) ", False)
        if callable(command):
            command()
        else:
            kernel.answer(command)
    return cell.wait()


def test_it_opens_where_the_cell_failed(shared_kernel: Kernel) -> None:
    """On the rank of the root cause or another, with the notebook's lines; operations are refused."""
    kernel = with_failure(shared_kernel)
    outcome = debug(kernel, "%debug", ["p y", "l", "up", "p rank, kept", "barrier()", "made = 3", "q"])
    assert outcome.status == "ok", outcome.traceback
    shown = printed(outcome)
    assert "(3)half()\n-> return y / (1 - x)\n2\n" in shown
    assert "def half(x):" in shown
    assert "(3)<module>()\n-> z = half(rank)\n(1, 8)\n" in shown
    assert "nbparallel/" not in shown
    assert "*** RuntimeError: operations between ranks work only while a cell runs" in shown
    other = debug(kernel, "%debug -r 0", ["w", "q"], rank=0)
    assert other.status == "ok", other.traceback
    assert "(4)<module>()\n-> barrier()\n" in printed(other)
    assert printed(kernel.run("%parallel kept + rank * made if rank else kept")) == (
        "Out[rank 0]: 7\nOut[rank 1]: 11\n"
    )


@pytest.mark.slow
def test_what_it_cannot_open_it_says(shared_kernel: Kernel) -> None:
    """No such rank, no user, frames that are gone or were not kept: one line, and the failure stays."""
    kernel = with_failure(shared_kernel)
    for code, said in (
        ("%debug -r 7", "%debug: there is no rank 7"),
        (
            "%debug -r 0,1",
            "ranks 0-1: there is one debugger, of a rank that raised; -r takes one of ranks 0-1",
        ),
        ("%debug -r x", "names no rank"),
        ("%debug", "on rank 1: no user can be asked for input()"),
    ):
        outcome = kernel.run(code)
        assert (outcome.status, outcome.ename) == ("error", "UsageError")
        assert said in outcome.evalue
    assert debug(kernel, "%debug", ["run", "q"]).status == "ok"
    assert kernel.run("%rank 1 0").status == "ok"
    assert "on rank 1: its frames are not there" in kernel.run("%debug").evalue
    assert debug(kernel, "%debug -r 0", ["q"], rank=0).status == "ok", "it ran no cell since"
    kernel.run("%config NbParallel.keep_frames = False")
    try:
        kernel.run(FAILS)
        assert "keep_frames = True keeps the next" in kernel.run("%debug").evalue
    finally:
        kernel.run("%config NbParallel.keep_frames = True")


ODD = """%%parallel -n 2
import numpy as np
kept = rank
class Raises(type):
    @property
    def __module__(cls): raise ZeroDivisionError("of the class")
class Odd(metaclass=Raises): pass
def f():
    view, odd = memoryview(b"a"), Odd()
    view.release()
    {}
    1 / 0
f()
"""


@pytest.mark.slow
def test_what_frames_hold_is_counted_without_harm(shared_kernel: Kernel) -> None:
    """Objects that raise when looked at leave the rank alive; many small ones hide no large one."""
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel")
    for local, said in (
        ("wide = np.lib.stride_tricks.sliding_window_view(np.zeros(10**6), 1000)", "no user can be asked"),
        ("large = np.empty(2**26); small = {i: [i] for i in range(300_000)}", "its frames held"),
    ):
        assert "ZeroDivisionError on ranks" in kernel.run(ODD.format(local)).evalue
        assert said in kernel.run("%debug").evalue
        assert "Out[rank 1]: 1" in printed(kernel.run("%parallel kept"))


@pytest.mark.slow
def test_other_failures_are_ipythons(shared_kernel: Kernel) -> None:
    """One of the notebook's own, code to debug, and everything once the extension is unloaded."""
    kernel = with_failure(shared_kernel)
    kernel.run("1 / 0")
    cell = kernel.begin("%debug", allow_stdin=True)
    assert kernel.question() == ("ipdb> ", False)
    kernel.answer("q")
    assert cell.wait().status == "ok"
    assert debug(kernel, "%debug -r 1", ["q"]).status == "ok"
    for code in ("%debug 1 + 1", "%unload_ext nbparallel\n1 / 0", "%debug"):
        cell = kernel.begin(code, allow_stdin=True)
        if "debug" in code:
            assert kernel.question() == ("ipdb> ", False)
            kernel.answer("c")
            assert cell.wait().status == "ok"
        else:
            cell.wait()


@pytest.mark.slow
def test_the_item_of_a_map(shared_kernel: Kernel) -> None:
    """``nbp.map``: the frame of the item that failed, with the function's source."""
    kernel = with_ranks(shared_kernel)
    failed = kernel.run(
        "import nbparallel as nbp\ndef f(x):\n    w = x + 1\n    return 1 // (x - 5)\n"
        "nbp.map(f, range(10), progress=False)"
    )
    (rank,) = re.findall(r"on rank (\d), item 5", failed.evalue)
    outcome = debug(kernel, "%debug", ["p x, w", "q"], rank=int(rank))
    assert "(4)f()\n-> return 1 // (x - 5)\n(5, 6)\n" in printed(outcome)


@pytest.mark.slow
@pytest.mark.fault("F5", "F20")
def test_what_ends_it(shared_kernel: Kernel) -> None:
    """An interrupt, at the prompt or in what was typed; a time-out; the rank's death, not another's."""
    kernel = with_failure(shared_kernel)
    assert debug(kernel, "%debug", [kernel.interrupt]).ename == "KeyboardInterrupt"
    cell = kernel.begin("%debug", allow_stdin=True)
    kernel.question()
    kernel.answer("interact")  # it takes an interrupt for one of its lines
    kernel.question()
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    cell = kernel.begin("%debug", allow_stdin=True)
    kernel.question()
    kernel.answer("import sys; print('endless', file=sys.stderr, flush=True); [0 for _ in iter(int, 1)]")
    cell.wait_for("endless")
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    kernel.run("%config NbParallel.timeout = 0.7")
    assert debug(kernel, "%debug", [lambda: None]).ename == "CellTimeoutError"
    kernel.run("%config NbParallel.timeout = 0.0")
    pids = [
        int(pid) for pid in re.findall(r": (\d+)", printed(kernel.run("import os\n%parallel os.getpid()")))
    ]
    kernel.run(FAILS)
    outcome = debug(kernel, "%debug", ["p y", lambda: (os.kill(pids[0], 9), kernel.answer("p x")), "q"])
    assert outcome.status == "ok", outcome.evalue
    outcome = debug(kernel, "%debug", [lambda: os.kill(pids[1], 9)])
    assert "on rank 1: rank 1 (process" in outcome.evalue
    assert "its frames are not there" in kernel.run("%debug").evalue


@pytest.mark.slow
def test_a_cell_that_was_stopped(shared_kernel: Kernel) -> None:
    """Also after a time-out the frames are those of the ranks, not those that waited for them."""
    kernel = with_ranks(shared_kernel)
    cell = "%%parallel --timeout 0.5\nimport time\ndef f(w):\n    time.sleep(60)\nf(rank + 3)"
    assert kernel.run(cell).ename == "CellTimeoutError"
    outcome = debug(kernel, "%debug -r 1", ["p w", "q"])
    assert printed(outcome).endswith("(4)f()\n-> time.sleep(60)\n4\n")


@pytest.mark.slow
def test_pdb_on_opens_it_by_itself(shared_kernel: Kernel) -> None:
    """As after any other cell; where nobody can be asked a line says so, and errors look as before."""
    kernel = with_failure(shared_kernel)
    kernel.run("%pdb on")
    outcome = debug(kernel, FAILS, ["p y", "q"])
    assert outcome.ename == "ParallelError"
    assert printed(outcome).endswith("-> return y / (1 - x)\n2\n")
    debug(kernel, FAILS, [kernel.interrupt])
    outcome = kernel.run(FAILS)
    kernel.run("%pdb off")
    shown = [m.content["traceback"][-1] for m in outcome.messages if m.kind == "error"]
    assert [line.partition(" on")[0] for line in shown] == [
        "ParallelError: ZeroDivisionError",
        "UsageError: %debug",
    ]
    assert kernel.run(FAILS).traceback.count("ParallelError: ") == 1


@pytest.mark.slow
def test_it_works_on_a_rank(shared_kernel: Kernel) -> None:
    """``%debug`` and ``pdb.pm()`` in a cell for that rank, as in IPython; several ranks are refused."""
    kernel = with_failure(shared_kernel)
    for code in ("%%rank 1\n%debug", "%%rank 1\nimport pdb\npdb.pm()", "%debug"):
        outcome = debug(kernel, code, ["p y", "q"])
        assert outcome.status == "ok", outcome.traceback
        assert "-> return y / (1 - x)\n2\n" in printed(outcome)
    several = kernel.begin("%%parallel\n%debug", allow_stdin=True).wait()
    assert "InputRefusedError on ranks 0-1" in several.evalue
    assert kernel.run("%rank 1 0").status == "ok"
    gone = kernel.run("%%rank 1\n%debug")
    assert "this rank has no frames of a cell that failed" in gone.evalue
