"""``--profile`` in a real kernel: the code with a bar a line stands below the cell."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel


@pytest.mark.slow
def test_the_profile_stands_below_the_cell(any_kernel: Kernel) -> None:
    """As text and as HTML, also of a cell that failed; `%parallel_profile` shows the last one again."""
    any_kernel.run("%load_ext nbparallel\nimport time\ndef nap(n):\n    time.sleep(n)", timeout=40)
    nothing = any_kernel.run("%parallel_profile")
    assert nothing.ename == "UsageError"
    done = any_kernel.run("%%parallel -n 2 --profile\ntime.sleep(0.1)\nx = rank", timeout=40)
    assert done.status == "ok"
    said = "of the time is line 2, mostly computing"
    assert said in done.displays[-1]["text/plain"].partition("\n")[0]
    assert said in done.displays[-1]["text/html"]
    failed = any_kernel.run("%%parallel --profile\nx = 1\ntime.sleep(0.2)\n1 / 0")
    assert failed.ename == "ParallelError"
    assert any("of the time is line 3" in display["text/plain"] for display in failed.displays)
    any_kernel.run("%parallel 1")
    assert "of the time is line 3" in any_kernel.run("%parallel_profile").result


@pytest.mark.slow
def test_a_cell_in_the_background_and_its_result(kernel: Kernel) -> None:
    """Profile and report of races stand below the cell when it has ended or failed, and below its result.

    A notebook that is run as a whole (nbclient) has lost what comes after a cell: its result shows it.
    """
    kernel.run("%load_ext nbparallel\nimport numpy as np, time\nx = np.zeros(2)\n%share x", timeout=40)
    flags = "%%parallel -n 2 --async --profile --check-races\n"
    for ending, ename in (("print('ended')", ""), ("1 / 0", "ParallelError")):
        cell = kernel.begin(f"{flags}time.sleep(0.3)\nx[0] += 1\n{ending}")
        cell.wait()
        result = kernel.run("%parallel_result", timeout=40)
        assert (result.ename, "ended" in result.stdout) == (ename, not ename)
        below = lambda cell=cell: [m.content["data"] for m in cell.messages if m.kind == "display_data"]  # noqa: E731
        kernel.wait_until(lambda below=below: "data race" in f"{below()}", 20, "a report below the cell")
        for displays in (below(), result.displays):
            assert any("of the time is line 2" in display["text/html"] for display in displays)
            assert any(display["text/plain"].startswith("1 data race") for display in displays)


@pytest.mark.slow
def test_a_map_has_a_profile(kernel: Kernel) -> None:
    """Of the function's lines; each rank sees its own items."""
    kernel.run("%load_ext nbparallel\nimport nbparallel as nbp, time", timeout=40)
    kernel.run("def work(n):\n    for step in range(60):\n        x = sum(range(20_000))\n    return n * 2")
    done = kernel.run("print(nbp.map(work, range(8), profile=True, progress=False))", timeout=40)
    assert done.stdout.strip() == "[0, 2, 4, 6, 8, 10, 12, 14]", done.traceback
    shown = kernel.run("%parallel_profile").result
    assert "is line 3 of In[2], mostly computing" in shown.partition("\n")[0]
