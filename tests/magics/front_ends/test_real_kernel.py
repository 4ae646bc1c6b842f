"""The magics in a real kernel with real ranks: what a reader of the notebook sees, and when."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

import pytest

from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import CellOutcome, Kernel

pytestmark = pytest.mark.time_limit(90)


def page(outcome: CellOutcome) -> list[tuple[str, Any]]:
    """Return what is left on the page, in order: (stream's name, text) or (kind, content)."""
    shown: list[tuple[str, Any]] = []
    clear = False
    for message in outcome.messages:
        if message.kind == "clear_output":
            clear = True
            if not message.content["wait"]:
                shown, clear = [], False
            continue
        if message.kind not in ("stream", "display_data", "execute_result", "error"):
            continue
        if clear:
            shown, clear = [], False
        name = message.content.get("name", "stdout")
        if message.printed and shown and shown[-1][0] == name:
            shown[-1] = (name, shown[-1][1] + message.printed)
        elif message.printed:
            shown.append((name, message.printed))
        else:
            shown.append((message.kind, message.content))
    return shown


def text(outcome: CellOutcome) -> str:
    """Return the text of both streams that is left on the page."""
    return "".join(content for kind, content in page(outcome) if kind in ("stdout", "stderr"))


def loaded(kernel: Kernel, *, prestarted: bool = True) -> Kernel:
    """Load the extension; `warm`: with what it starts in the background."""
    outcome = kernel.run(
        f"get_ipython().config.NbParallel.warm = {prestarted}\n"
        "%load_ext nbparallel\n%config NbParallel.welcome = False"
    )
    assert outcome.status == "ok", outcome.traceback
    return kernel


@pytest.mark.alone
def test_output_is_labelled_live_and_in_its_cell(shared_kernel: Kernel) -> None:
    """Output comes under labels within 0.2 s, in the cell that caused it, finally in rank order."""
    loaded(shared_kernel)
    first = shared_kernel.run("%%parallel -n 3\nprint('hello from', rank)\nrank * rank")
    assert page(first) == [
        (
            "stdout",
            "[rank 0] hello from 0\n[rank 1] hello from 1\n[rank 2] hello from 2\n"
            "Out[rank 0]: 0\nOut[rank 1]: 1\nOut[rank 2]: 4\n",
        )
    ]
    slow = shared_kernel.run(
        "%%parallel\nimport time\nfor step in range(3):\n"
        "    time.sleep(0.3 + 0.1 * (2 - rank))\n    print(step, time.monotonic())"
    )
    times = [m for m in slow.messages if m.kind == "stream"]
    assert len(times) > 3
    assert [m.kind for m in slow.messages].count("clear_output") == 1
    ranks = [line for line in text(slow).splitlines() if line.startswith("[")]
    assert ranks == ["[rank 0]", "[rank 1]", "[rank 2]"]
    for message in times[:3]:
        printed = float(message.content["text"].split()[-1])
        assert message.seconds - printed < 0.2

    late = shared_kernel.run(
        "%%parallel -r 0\nimport threading, time\n"
        "def later():\n    time.sleep(0.3)\n    print('late words')\n"
        "threading.Thread(target=later).start()\nprint('started')"
    )
    other = shared_kernel.run("import time; print('local'); time.sleep(0.6); print('local 2')")
    assert text(other) == "local\nlocal 2\n"
    mine = shared_kernel.messages_of(late.messages[0].parent)
    assert "[rank 0] late words\n" in "".join(m.content.get("text", "") for m in mine)


@pytest.mark.slow
def test_an_interrupt_reaches_a_cell_of_another_thread(shared_kernel: Kernel) -> None:
    """A subshell's cell runs in one: the stop button ends it while the main shell is idle."""
    loaded(shared_kernel)
    shared_kernel.run("%parallel -n 2 import time")
    shared_kernel.run(
        "import threading, time\nerrors = []\ndef work():\n    try:\n"
        "        get_ipython().run_line_magic('parallel', '[time.sleep(0.02) for _ in range(1500)]')\n"
        "    except BaseException as error:\n        errors.append(type(error).__name__)\n"
        "thread = threading.Thread(target=work)\nthread.start()\ntime.sleep(0.5)"
    )
    shared_kernel.interrupt()
    assert text(shared_kernel.run("thread.join(10)\nprint(errors)")) == "['KeyboardInterrupt']\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handled", "name"),
    [
        ("except Exception as e:\n    raise RuntimeError('job') from e", "RuntimeError"),
        ("except Exception:\n    raise RuntimeError('job') from None", "RuntimeError"),
        ("finally:\n    {}['x']", "KeyError"),
        ("except* ZeroDivisionError:\n    raise RuntimeError('job')", "RuntimeError"),
    ],
)
def test_an_error_raised_while_one_of_ranks_is_handled(
    shared_kernel: Kernel, handled: str, name: str
) -> None:
    """It is the cell's one error message, with the lines of ranks above it unless it is raised from None."""
    loaded(shared_kernel)
    outcome = shared_kernel.run(f"try:\n    get_ipython().run_line_magic('parallel', '1 / 0')\n{handled}")
    assert (outcome.status, outcome.ename) == ("error", name)
    assert [m.content["ename"] for m in outcome.messages if m.kind == "error"] == [name]
    assert outcome.stderr == ""
    shown = re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)
    assert ("division by zero" in shown) == ("None" not in handled)
    assert "nbparallel" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "longest"),
    [
        ("nbp.map(f, [0])", 0),
        ("nbp.Session.map(session, f, [0])", 0),
        ("session.run('1 / 0')", 0),
        ("session.call(f, 0)", 0),
        ("session.submit('1 / 0').result()", 1),  # the line that raises there
        ("get_ipython().run_cell_magic('parallel', '', '1 / 0')", 1),  # IPython's
        ("get_ipython().run_line_magic('parallel', '1 / 0')", 1),
        ("session.run('import time; time.sleep(60)', timeout=0.2)", 0),
    ],
)
def test_a_log_of_what_ranks_raised_is_short(shared_kernel: Kernel, call: str, longest: int) -> None:
    """`logging.exception` writes the user's line and what ranks say, without the frames of this package."""
    loaded(shared_kernel)
    assert shared_kernel.run("%%parallel\nwarm = 1").status == "ok"
    outcome = shared_kernel.run(
        "import logging, traceback, nbparallel as nbp\n"
        "from nbparallel.session import running_sessions\n"
        "session, _ = running_sessions.current()\n"
        "f = lambda i: 1 / i\n"
        f"try:\n    {call}\n"
        "except Exception as error:\n    logging.exception('the job failed')\n"
        "    frames = traceback.extract_tb(error.__traceback__)"
    )
    assert outcome.status == "ok", outcome.traceback
    assert "the job failed" in outcome.stderr
    assert call in outcome.stderr
    assert text(shared_kernel.run("print(len(frames))")).strip() == str(1 + longest)


@pytest.mark.slow
def test_a_script_that_fails_on_ranks_is_an_error(shared_kernel: Kernel, tmp_path: Path) -> None:
    """`%run -i` of a file shows one error message, by which papermill knows that it failed."""
    loaded(shared_kernel)
    (tmp_path / "job.py").write_text("nbp.map(lambda i: 1 / i, [0])\n")
    outcome = shared_kernel.run(f"import nbparallel as nbp\n%run -i {tmp_path / 'job.py'}")
    assert [m.content["ename"] for m in outcome.messages if m.kind == "error"] == ["ParallelError"]
    assert outcome.stderr == ""


@pytest.mark.every_kernel
def test_an_interrupt_leaves_the_ranks_alive(shared_kernel: Kernel) -> None:
    """The stop button ends the cell as a KeyboardInterrupt; variables stay, and the next cell works."""
    loaded(shared_kernel)
    shared_kernel.run("%%parallel -n 2\nx = rank + 10")
    cell = shared_kernel.begin("%%parallel\nimport time\nprint('sleeping', flush=True)\ntime.sleep(60)")
    cell.wait_for("sleeping")
    shared_kernel.interrupt()
    outcome = cell.wait()
    assert (outcome.status, outcome.ename) == ("error", "KeyboardInterrupt")
    assert "run_cell_magic" not in outcome.traceback
    assert text(shared_kernel.run("%parallel x")) == "Out[rank 0]: 10\nOut[rank 1]: 11\n"


@pytest.mark.slow
def test_what_the_notebook_printed_stays(shared_kernel: Kernel) -> None:
    """Printing again in rank order keeps what the notebook itself showed in the cell."""
    loaded(shared_kernel)
    out_of_order = "import time; time.sleep(0.2 * (2 - rank)); print('rank', rank)"
    shared_kernel.run("%parallel -n 2 1")
    line = f"%parallel {out_of_order}"
    outcome = shared_kernel.run(f"print('above')\n{line}\nprint('between')\n{line}\nprint('below')\n7")
    lines = "[rank 0] rank 0\n[rank 1] rank 1\n"
    assert page(outcome)[0] == ("stdout", f"above\n{lines}between\n{lines}below\n")
    assert page(outcome)[1][1]["data"]["text/plain"] == "7"
    local = shared_kernel.run(
        "%%parallel --local\nimport time\nme = globals().get('rank', -1)\n"
        "time.sleep(max(0, 0.2 * (1 - me)))\nprint('rank', me)"
    )
    assert text(local) == f"rank -1\n{lines}"


@pytest.mark.slow
def test_capture_gets_everything(shared_kernel: Kernel) -> None:
    """`%%capture` captures what ranks print, as it does what the notebook prints."""
    loaded(shared_kernel)
    outcome = shared_kernel.run("%%capture words\n%%parallel -n 2\nprint('hello')")
    assert page(outcome) == []
    words = ast.literal_eval(shared_kernel.run("words.stdout").result)
    folded, apart = ["[ranks 0-1] hello"], ["[rank 0] hello", "[rank 1] hello"]  # by when they came
    assert sorted(words.splitlines()) in (folded, apart)


@pytest.mark.slow
@pytest.mark.fault("F70")
@pytest.mark.once
@pytest.mark.time_limit(240)
@pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.stress)])
def test_load_and_unload_many_times(kernel: Kernel, times: int) -> None:
    """Load, reload, cell, unload: threads, files, hooks stay as many, no process is left (F70)."""
    once = (
        "%load_ext nbparallel\n"
        "%load_ext nbparallel\n"
        "%parallel -n 1 --quiet rank\n"
        "%reload_ext nbparallel\n"
        "%parallel --quiet rank\n"
        "%unload_ext nbparallel\n"
    )
    kernel.run(
        "import os, threading\n"
        "def state():\n"
        "    ip = get_ipython()\n"
        "    files = [os.readlink(e.path) for e in os.scandir('/proc/self/fd') if e.is_symlink()\n"
        "             and os.path.exists(e.path)]\n"
        "    files = [name for name in files if 'profile_default' not in name]  # IPython's history\n"
        "    return (len(files), threading.active_count(), len(ip.configurables),\n"
        "            sum(map(len, ip.events.callbacks.values())), len(ip.magics_manager.magics['cell']))"
    )
    kernel.run(once)
    kernel.run("before = state()")
    for _ in range(times // 5):
        outcome = kernel.run(once * 5, timeout=60)
        assert outcome.status == "ok", outcome.traceback
    assert kernel.run("state() == before or (before, state())").result == "True"
    assert kernel.descendants() == []


@pytest.mark.alone
def test_loading_is_quick(kernel: Kernel) -> None:
    """`%load_ext nbparallel` takes less than 0.15 s of a processor; numpy and ranks' messages come later."""
    kernel.run("import time, sys; t = time.thread_time()\n%load_ext nbparallel\nt = time.thread_time() - t")
    assert kernel.run("{'numpy', 'nbparallel.wire.messages'} & {*sys.modules}").result == "set()"
    assert float(kernel.run("t").result) < 0.15


@pytest.mark.slow
def test_tracebacks_show_the_lines_of_the_notebooks_other_cells(shared_kernel: Kernel) -> None:
    """A function defined in a notebook cell fails on a rank: the traceback names its own cell and line."""
    loaded(shared_kernel)
    defined = shared_kernel.run(
        "def divide(a):\n    b = a\n    return b / 0\nclass Divider:\n    go = staticmethod(divide)\n"
        "    def __call__(self):\n        return divide(1)"
    )
    for call, frames in (("divide(3)", [3]), ("Divider()()", [7, 3]), ("[f(1) for f in [divide]]", [3])):
        failed = shared_kernel.run(f"%%parallel -n 2\n{call}")
        shown = re.sub(r"\x1b\[[0-9;]*m", "", failed.traceback)
        assert f"Cell In[{failed.execution_count}], line 2" in shown
        for line in frames:
            assert f"Cell In[{defined.execution_count}], line {line}, in " in shown
        assert "----> 3     return b / 0" in shown
        assert "Could not get source" not in shown


@pytest.mark.slow
def test_memory_goes_back_when_its_cell_ends(kernel: Kernel) -> None:
    """`del x` in a cell of the notebook frees the array's segment, without a parallel cell."""
    assert (
        kernel.run("%load_ext nbparallel\nimport numpy as np, nbparallel\nx = np.ones(1 << 20)").status
        == "ok"
    )
    assert kernel.run("%%parallel -n 2\nx.sum();").status == "ok"
    assert kernel.run("%%parallel\n1;").status == "ok"
    assert kernel.run("del x").status == "ok"
    assert kernel.run("%%parallel\n1;").status == "ok"  # the ranks let go of the deleted name
    # The supervisor's word that nobody uses it any more may still be on its way: every cell looks again.
    look = "assert all(s.phase == 'pooled' for s in nbparallel.segments()), nbparallel.segments()"
    wait_until(lambda: kernel.run(look).status == "ok", lambda: kernel.run(look).evalue)


@pytest.mark.slow
def test_time_over_ranks_has_their_processor_time(shared_kernel: Kernel) -> None:
    """``%%time`` itself sees this process only; its line ends the last rank's block."""
    loaded(shared_kernel)
    cell = "%%time\n%%parallel -n 2\nimport time\nend = time.process_time() + 0.3\n"
    shown = text(shared_kernel.run(f"{cell}while time.process_time() < end: pass\nprint('a\\nb', rank)"))
    used = re.search(r"b 1\n\[nbparallel\] ranks 0-1 used (\d+) ms of processor time\nCPU times: ", shown)
    assert used, shown
    assert int(used[1]) >= 600
    assert "processor time" not in text(shared_kernel.run("%%parallel\nprint(1)"))


def test_notes_stand_back(shared_kernel: Kernel) -> None:
    """Lines of the library's own are muted in HTML, several in one display, and text elsewhere."""
    kernel = loaded(shared_kernel)
    outcome = kernel.run("import numpy as np; x = np.ones(1 << 17)\n%parallel -n 2 -o total total = x.sum()")
    assert outcome.status == "ok", outcome.traceback
    (note,) = [message.content["data"] for message in outcome.messages if message.is_note]
    assert all(line.startswith("[nbparallel] ") for line in note["text/plain"].splitlines())
    assert re.findall(r'<div style="opacity:\.7[^>]*>\[nbparallel\] ([^<]*)</div>', note["text/html"]) == [
        html.escape(line.removeprefix("[nbparallel] ")) for line in note["text/plain"].splitlines()
    ]
