"""``nbp.map`` in a notebook: on its ranks, with its bar, interrupted by its button."""

from __future__ import annotations

import re

import pytest

from tests.harness.kernel import CellOutcome, Kernel

pytestmark = pytest.mark.time_limit(60)


def files_in(outcome: CellOutcome) -> list[str]:
    """Return the files whose frames a traceback shows."""
    return re.findall(r"File .*?([\w]+\.py)", re.sub(r"\x1b\[[0-9;]*m", "", "".join(outcome.traceback)))


@pytest.mark.slow
def test_the_notebook_s_ranks_do_it(shared_kernel: Kernel) -> None:
    """The ranks of the last cell do it; a function reads the notebook's globals; the results are in order."""
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel\nimport os, nbparallel as nbp\n%config NbParallel.welcome = False")
    kernel.run("%%parallel -n 2 -o pids\nimport os\nos.getpid()")
    kernel.run("factor = 3\ndef work(x):\n    return factor * x, os.getpid()")
    outcome = kernel.run(
        "found = nbp.map(work, range(20))\n"
        "assert [x for x, _ in found] == [3 * x for x in range(20)]\n"
        "assert {pid for _, pid in found} <= set(pids)\n"
        "nbp.map(work, [], progress=False)"
    )
    assert outcome.status == "ok", outcome.traceback


@pytest.mark.slow
def test_it_starts_the_ranks(shared_kernel: Kernel) -> None:
    """Without a cell before it, it starts the notebook's ranks, which the next cell uses."""
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel\n%config NbParallel.n = 3\nimport nbparallel as nbp")
    assert kernel.run("assert nbp.map(abs, [-1, -2]) == [1, 2]").status == "ok"
    assert kernel.run("%parallel -o sizes world_size\nassert sizes == [3, 3, 3]").status == "ok"


@pytest.mark.slow
def test_the_bar_is_tqdm_s_own(shared_kernel: Kernel) -> None:
    """In a notebook it is tqdm's widget, and at the end, also when saved, text; on ranks it is text."""
    kernel = shared_kernel
    if kernel.run("import tqdm, ipywidgets").status != "ok":
        pytest.skip("tqdm is not installed in the kernel")
    kernel.run("%load_ext nbparallel\n%parallel -n 2 1;\nimport nbparallel as nbp")
    outcome = kernel.run("nbp.map(abs, range(6));")
    assert outcome.status == "ok", outcome.traceback
    assert any("application/vnd.jupyter.widget-view+json" in data for data in outcome.displays)
    assert outcome.stderr == ""
    last = [message.content["data"] for message in outcome.messages if message.kind == "update_display_data"]
    assert [list(data) for data in last] == [["text/plain"]]
    assert re.fullmatch(r"6 of 6, \S+ m?s", last[0]["text/plain"])
    outcome = kernel.run("%%parallel -r 0\nfrom tqdm.notebook import tqdm\nfor i in tqdm(range(40)): pass")
    assert "40/40" in outcome.stderr


@pytest.mark.slow
@pytest.mark.every_kernel
def test_an_interrupt_and_an_error_leave_the_ranks_usable(shared_kernel: Kernel) -> None:
    """The button raises KeyboardInterrupt, an error names rank and item; then the ranks go on.

    Frames of the library that waited are not shown.
    """
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel\nimport time, nbparallel as nbp\n%parallel -n 2 kept = rank")
    begun = kernel.begin(
        "def work(x):\n    print('begun', flush=True)\n    time.sleep(30)\n"
        "nbp.map(work, range(4), progress=False)"
    )
    begun.wait_for("begun")  # in this cell, under the name of its rank
    begun.wait_for("[rank")
    kernel.interrupt()
    stopped = begun.wait()
    assert stopped.ename == "KeyboardInterrupt"
    assert files_in(stopped) in ([], ["functions.py"]), stopped.traceback
    failed = kernel.run("nbp.map(lambda x: 1 / x, [2, 0], progress=False)")
    assert failed.ename == "ParallelError"
    assert "item 1 (0)" in failed.evalue
    defined = kernel.run("def inverse(x):\n    return 1 / x")
    failed = kernel.run("nbp.map(inverse, [2, 0], progress=False)")
    cell = f"In[{defined.execution_count}]"
    assert f"line 2 of {cell}" in failed.evalue
    assert f"Cell {cell}, line 2, in inverse(x)" in re.sub(r"\x1b\[[0-9;]*m", "", "".join(failed.traceback))
    assert kernel.run("%parallel -o kept_there kept\nassert kept_there == [0, 1]").status == "ok"
