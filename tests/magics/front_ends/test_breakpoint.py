"""``breakpoint()`` in a real kernel: a debugger for one rank, a refusal for several, never a hang."""

from __future__ import annotations

import re

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import printed, with_ranks
from tests.magics.front_ends.test_post_mortem import debug

pytestmark = pytest.mark.time_limit(90)


CHOSEN = "os.environ['PYTHONBREAKPOINT'] = 'pdb.set_trace'\n"


@pytest.mark.slow
def test_it_stops_where_it_is_called(shared_kernel: Kernel) -> None:
    """Behind a cell's last statement too; an assignment is the rank's, and nothing is left in its names."""
    kernel = with_ranks(shared_kernel)
    outcome = debug(kernel, "%%parallel -r 0\nval = 41\nbreakpoint()", ["p val + 1", "kept = 7", "c"], rank=0)
    assert outcome.status == "ok", outcome.traceback
    assert "(3)<module>()\n-> breakpoint()\n42\n" in printed(outcome)
    after = kernel.run("%parallel -r 0 kept, '__return__' in globals()")
    assert printed(after) == "Out[rank 0]: (7, False)\n"


@pytest.mark.slow
def test_stepping_stays_in_the_cell(shared_kernel: Kernel) -> None:
    """From statement to statement, into functions and out; the next cell is nobody's to stop in."""
    kernel = with_ranks(shared_kernel)
    cell = (
        "%%parallel -r 0\nimport numpy as np\ndef f(x):\n    y = barrier\n    return x * 10\n"
        "breakpoint()\nz = f(4)\nprint(z + len(np.ones(3)))"
    )
    outcome = debug(kernel, cell, ["n", "s", "s", "n", "p x", "n", "n", "n"], rank=0)
    assert outcome.status == "ok", outcome.traceback
    shown = printed(outcome)
    stops = re.findall(r"-> (.+)|^(\d+)$|--(Return|Call)--", shown, re.MULTILINE)
    assert ["".join(stop) for stop in stops] == [
        "breakpoint()",
        "z = f(4)",
        "Call",
        "def f(x):",
        "y = barrier",
        "return x * 10",
        "4",
        "Return",
        "return x * 10",
        "print(z + len(np.ones(3)))",
        "43",
    ]
    assert "interactiveshell" not in shown
    assert "nbparallel" not in shown
    assert printed(kernel.run("%parallel kept")) == "Out[rank 0]: 7\nOut[rank 1]: 8\n"


@pytest.mark.slow
def test_leaving_it_ends_the_cell(shared_kernel: Kernel) -> None:
    """With ``q`` as an error on the line where it was; an interrupt at its prompt is the cell's."""
    kernel = with_ranks(shared_kernel)
    for commands, line in ((["q"], 2), (["n", "q"], 3)):
        outcome = debug(kernel, "%%parallel -r 0\nbreakpoint()\nkept = 0", commands, rank=0)
        assert f"BdbQuit on rank 0, line {line}" in outcome.evalue
        assert "bdb.py" not in outcome.traceback
    cell = kernel.begin("%%parallel\nrank == 0 and breakpoint()\nbarrier()", allow_stdin=True)
    kernel.question()
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert printed(kernel.run("%parallel kept")) == "Out[rank 0]: 7\nOut[rank 1]: 8\n"


@pytest.mark.slow
def test_set_trace_is_the_same(shared_kernel: Kernel) -> None:
    """``pdb.set_trace()``: it stops there, an interrupt is the cell's, and several ranks are refused."""
    kernel = with_ranks(shared_kernel)
    outcome = debug(kernel, "%%parallel -r 0\nimport pdb\npdb.set_trace()\n1", ["p kept", "c"], rank=0)
    assert outcome.status == "ok", outcome.traceback
    assert "(3)<module>()\n-> pdb.set_trace()\n7\n" in printed(outcome)
    cell = kernel.begin("%%parallel -r 0\nimport os\n" + CHOSEN + "breakpoint()", allow_stdin=True)
    kernel.question()
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    cell = kernel.begin(
        "%%parallel -r 0\nfrom IPython.core.debugger import set_trace\nset_trace()", allow_stdin=True
    )
    kernel.question()
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    several = kernel.begin("%%parallel\nimport pdb\npdb.set_trace()", allow_stdin=True).wait()
    assert "set_trace() asks with input(): ranks 0-1 called input()" in "".join(several.traceback)
    assert printed(kernel.run("%parallel kept")) == "Out[rank 0]: 7\nOut[rank 1]: 8\n"


@pytest.mark.slow
def test_it_is_refused_where_nobody_can_answer(shared_kernel: Kernel) -> None:
    """On several ranks, and as in nbclient: an error on the cell's line that says what to write."""
    kernel = with_ranks(shared_kernel)
    several = kernel.begin("%%parallel\n1\nbreakpoint()", allow_stdin=True).wait()
    assert "InputRefusedError on ranks 0-1, line 3: breakpoint() asks with input(): " in several.evalue
    assert "`if rank == 0:`" in several.evalue
    nobody = kernel.run("%%parallel -r 1\nbreakpoint()")
    assert "InputRefusedError on rank 1, line 2: breakpoint() asks with input(): no user" in nobody.evalue
    off = kernel.run("%%parallel\nimport os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()")
    assert off.status == "ok", off.traceback
    assert printed(kernel.run("%parallel kept")) == "Out[rank 0]: 7\nOut[rank 1]: 8\n"
