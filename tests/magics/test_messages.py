"""Single lines of the first hour, in a real kernel: each names what happened and what to type."""

from __future__ import annotations

import re

import pytest

from tests.harness.kernel import Kernel
from tests.magics.cells import text, with_ranks

pytestmark = pytest.mark.time_limit(90)


@pytest.mark.slow
def test_a_lone_surrogate_leaves_no_cell_without_a_reply(shared_kernel: Kernel) -> None:
    """An error's text, a value, a name, a display: each cell ends, and the next error is shown as ever."""
    kernel = with_ranks(shared_kernel)
    for cell in (
        "raise ValueError('a\\ud800b')",
        "raise type('E\\ud800', (ValueError,), {})('x')",
        "raise ExceptionGroup('g\\ud800', [ValueError('\\udfff')])",
        "def f():\n    raise KeyError('\\ud800')\nf()",
    ):
        failed = kernel.run(f"%%parallel\n{cell}")
        assert (failed.status, failed.ename) == ("error", "ParallelError"), cell
        assert "\\ud800" in failed.evalue, failed.evalue
    assert "a\\ud800" in text(kernel.run("%parallel print('a\\ud800')"))
    # `str`: a cell of a bare literal has a docstring, which CPython 3.13 encodes when it compiles
    for cell in (
        "globals()['n\\ud800'] = 1\ndisplay({'text/plain': 'd\\ud800'}, raw=True)",
        "str('v\\ud800')",
    ):
        assert kernel.run(f"%%parallel\n{cell}").status == "ok"
    who = kernel.run("%parallel_who")
    assert "n\\ud800" in who.displays[0]["text/plain"]
    assert "n\\ud800" in who.displays[0]["text/html"]
    zero = kernel.run("%%parallel\n1 / 0")
    assert "ZeroDivisionError on ranks 0-1, line 2" in zero.evalue
    assert "Traceback" not in zero.traceback.partition("[ranks 0-1]")[0]
    assert kernel.run("%parallel_tb").status == "ok"


@pytest.mark.slow
def test_what_stop_and_a_switch_did_is_one_line(shared_kernel: Kernel) -> None:
    """No table, and no silence."""
    kernel = with_ranks(shared_kernel)
    switched = kernel.run("%sharing_strategy file_region")
    assert text(switched).startswith("sharing strategy: file_region for new arrays;")
    assert (text(switched).count("\n"), switched.displays) == (1, ())
    kernel.run("%sharing_strategy file_descriptor")
    assert (
        text(kernel.run("%parallel_stop")) == "ranks 0-1 were ended; the notebook's arrays stay as they are\n"
    )


@pytest.mark.slow
def test_ipythons_open_is_no_name_of_the_users(shared_kernel: Kernel) -> None:
    """A cell that opens a file copies nothing; the user's own function of that name travels."""
    kernel = with_ranks(shared_kernel)
    used = kernel.run("%%parallel\nopen('/dev/null').close()\nopen.__module__")
    assert "copied" not in text(used)
    assert "open" not in kernel.run("%parallel_who").displays[0]["text/plain"]
    kernel.run("def open(path): return 'mine'")
    assert text(kernel.run("%parallel open('x')")) == "Out[ranks 0-1]: 'mine'\n"
    assert "open" in kernel.run("%parallel_who").displays[0]["text/plain"]


@pytest.mark.slow
def test_a_list_cannot_be_shared(shared_kernel: Kernel) -> None:
    """One line, whose class and advice fit."""
    kernel = with_ranks(shared_kernel)
    refused = kernel.run("y = [1, 2]\n%share y")
    assert refused.ename == "NotAnArrayError"
    assert "'y' is of type list" in refused.evalue
    assert "`y = np.array(y)`" in refused.evalue
    assert len("".join(refused.traceback).splitlines()) == 1


@pytest.mark.slow
def test_an_array_that_a_cell_has_shown_has_no_other_owner(shared_kernel: Kernel) -> None:
    """IPython keeps it in four places, which follow it into shared memory; a list of the user does not."""
    kernel = with_ranks(shared_kernel)
    kernel.run("import numpy as np\ng = np.zeros(3)\ng")
    shared = kernel.run("%share g\nprint(_ is g)")
    assert "still has the old array" not in shared.stderr + shared.stdout
    assert "True" in shared.stdout
    kernel.run("both = [np.ones(3)]\nw = both[0]\nw")
    again = kernel.run("%share w")
    assert "still has the old array" in again.stderr + again.stdout
    kernel.run("del g, w, both")


@pytest.mark.slow
def test_the_values_of_a_cell_in_flight(shared_kernel: Kernel) -> None:
    """The name of `-o` raises, however it is used, and says what to wait for; then it has the values."""
    kernel = with_ranks(shared_kernel)
    kernel.run("import nbparallel as nbp\nflag = nbp.zeros(1)\nlate = 'old'")
    cell = "import time\nwhile not flag[0]: time.sleep(0.01)\nprint('printed')\nrank"
    number = kernel.run(f"%%parallel --async -o late\n{cell}").execution_count
    for use in (
        "late[0]",
        "sum(late)",
        "late.gather()",
        "late + 1",
        "print(late)",
        "f'{late}'",
        "bool(late)",
    ):
        used = kernel.run(use)
        assert used.ename == "BusyError", use
        assert f"late has no values yet, because In[{number}] still runs" in used.evalue
        assert "%parallel_result waits for it" in used.evalue
        assert len("".join(used.traceback).splitlines()) == 1, used.traceback
    assert "has no values yet" in kernel.run("late").result
    busy = kernel.run("%%parallel\nlate")
    assert "give a cell --queue; to stop it, interrupt that wait, or call cancel()" in busy.evalue
    kernel.run("flag[0] = 1")
    fetched = kernel.run("kept = %parallel_result")
    assert (text(fetched), fetched.result) == ("", "")
    assert kernel.run("list(late), kept.values == late").result == "([0, 1], True)"
    shown = kernel.run("kept")
    assert (text(shown), shown.result) == ("[ranks 0-1] printed\n", "")
    assert kernel.run("kept.seconds > 0, kept[1].stdout").result == "(True, 'printed\\n')"
    again = kernel.run("%parallel_result")
    assert (text(again).count("printed"), again.result) == (1, "")
    kernel.run("flag[0] = 0\n%parallel --async while not flag[0]: pass")
    kernel.run("%parallel --async --queue -o queued 1")
    assert re.search(r"because In\[\d+\] has not begun on the ranks", kernel.run("queued").result)
    kernel.run("flag[0] = 1\n%parallel_result")


@pytest.mark.slow
def test_a_monitored_barrier_calls_itself_so(shared_kernel: Kernel) -> None:
    """In its time-out, and when another rank calls something else."""
    kernel = with_ranks(shared_kernel)
    late = kernel.run(
        "%%parallel\nimport time\nif rank: dist.monitored_barrier(timeout=0.2)\ntime.sleep(0.5)"
    )
    assert "monitored_barrier on line 3: timed out" in late.evalue
    other = kernel.run("%%parallel\nbarrier() if rank else dist.monitored_barrier()")
    assert re.search(r"0 +monitored_barrier ", other.traceback), other.traceback


@pytest.mark.slow
def test_deaths_of_many_ranks_are_one_line(shared_kernel: Kernel) -> None:
    """Those that ended alike share a note, and so do those that did not answer an interrupt."""
    kernel = with_ranks(shared_kernel, 4)
    kernel.run("%%parallel\nimport os\nos.kill(os.getpid(), 9 if rank < 3 else 15)")
    again = text(kernel.run("%%parallel\npass"))
    assert re.search(r"ranks 0-2 were killed by SIGKILL.*; they were started again", again), again
    assert (
        "rank 3 was ended by SIGTERM; it was started again under its number, without its variables" in again
    )
    cell = kernel.begin("%%parallel\nprint('begun', flush=True)\nsum(range(10**13)) if rank < 3 else None")
    cell.wait_for("begun")
    for word in ("ranks 0-2 not stopped yet", "ranks 0-2 did not answer the interrupt and were ended"):
        kernel.interrupt()
        kernel.wait_until(
            lambda: any(m.kind == "stream" for m in cell.messages), 5, "the note of the first interrupt"
        )
        del word
    assert cell.wait(30).ename == "KeyboardInterrupt"
    assert text(kernel.run("%%parallel\npass")).count("\n") == 1


@pytest.mark.slow
def test_an_alarm_in_the_notebook_shows_the_notebooks_frames(shared_kernel: Kernel) -> None:
    """The ranks stop, and the traceback has the cell and the handler, and no frame between them."""
    kernel = with_ranks(shared_kernel)
    kernel.run(
        "import os, signal, threading\ndef late(*_): raise TimeoutError('mine')\n"
        "signal.signal(signal.SIGUSR1, late)\n"
        "timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR1))\ntimer.start()"
    )
    cell = kernel.run("%%parallel\nimport time\nwhile True: time.sleep(0.01)")
    assert (cell.ename, cell.evalue) == ("TimeoutError", "mine")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "".join(cell.traceback))
    assert "the ranks were interrupted" in shown
    assert "def late(*_): raise TimeoutError('mine')" in shown
    assert "nbparallel/" not in shown.replace("nbparallel/tests", ""), shown
    assert text(kernel.run("%parallel 1")) == "Out[ranks 0-1]: 1\n"
    kernel.run("timer.join()")


@pytest.mark.slow
def test_a_cell_without_a_value_is_explained(shared_kernel: Kernel) -> None:
    """Some wondered that ``-o`` gives None."""
    kernel = with_ranks(shared_kernel)
    kernel.run("total = 0")
    with_out = kernel.run("%%parallel -o total\ntotal = all_reduce(rank)")
    line = "the cell does not end with an expression, so each rank's value in total is None"
    assert text(with_out) == f"[nbparallel] {line}: end it with a line `total`\n"
    assert line in text(kernel.run("%%parallel -o total\nimport os"))
    assert text(kernel.run("%%parallel -o total\nrank")) == ""
    kernel.run("%%parallel -o total\ntotal = all_reduce(rank)\ntotal")
    assert kernel.run("assert total == [1, 1]").status == "ok"
