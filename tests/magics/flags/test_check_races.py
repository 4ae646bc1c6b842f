"""``--check-races`` in a real kernel: the report stands below the cell."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel, RunningCell

SETUP = "%load_ext nbparallel\nimport numpy as np\ncounter = np.zeros(2)\n%share counter"
RACE = "`counter[0]`: ranks 0-1 each read and wrote it on line 2"


@pytest.mark.slow
def test_the_report_stands_below_the_cell(any_kernel: Kernel) -> None:
    """As text and as HTML, after output; also below a cell that failed, and none without the flag."""
    any_kernel.run(SETUP, timeout=40)
    done = any_kernel.run("%%parallel -n 2 --check-races\ncounter[0] += 1\nprint('done')", timeout=40)
    assert done.status == "ok"
    texts = [display["text/plain"] for display in done.displays]
    assert texts[-1].startswith("1 data race\n" + RACE)
    assert "<code>counter[0]</code>" in done.displays[-1]["text/html"]
    failed = any_kernel.run("%%parallel --check-races\ncounter[0] += 1\n1 / 0")
    assert failed.ename == "ParallelError"
    assert any(RACE in display["text/plain"] for display in failed.displays)
    plain = any_kernel.run("%%parallel\ncounter[0] += 1")
    assert not any("race" in str(display) for display in plain.displays)
    silent = any_kernel.run("%%rank 0 --check-races --quiet\ncounter[0] += 1")
    assert [display["text/plain"] for display in silent.displays] == ["no race among 2 accesses"]


@pytest.mark.slow
def test_the_last_report_again(kernel: Kernel) -> None:
    """`%parallel_races` returns the report of the last cell, also of a line and of a failed cell."""
    kernel.run(SETUP, timeout=40)
    found = "report = %parallel_races\nassert len(report.races) == {}, report"
    for cell, count in (
        ("%%parallel -n 2 --check-races\ncounter[0] += 1", 1),
        ("%%parallel --check-races\ncounter[rank] += 1", 0),
        ("%parallel --check-races --quiet np.add(counter, 1, out=counter)", 1),
        ("%rank 0 --check-races counter.sum()", 0),
        ("%%parallel --check-races\ncounter[0] = rank\n1 / 0", 1),
    ):
        kernel.run(cell, timeout=40)
        again = kernel.run(found.format(count))
        assert again.status == "ok", (cell, again.traceback)
    assert kernel.run("%parallel_races").result.startswith("1 data race")
    missed = kernel.run(found.format(0))
    assert (missed.ename, "`counter[0]`: ranks 0" in missed.evalue) == ("AssertionError", True)
    kernel.run("%parallel counter[0]")
    unchecked = kernel.run(found.format(1))
    assert unchecked.ename == "UsageError"


def reports(cell: RunningCell) -> list[str]:
    """Return what the cell has displayed, but for notes."""
    texts = [m.content["data"]["text/plain"] for m in cell.messages if m.kind == "display_data"]
    return [text for text in texts if not text.startswith("[nbparallel]")]


@pytest.mark.slow
def test_a_cell_in_the_background(kernel: Kernel) -> None:
    """The report stands below that cell when it has ended, or was cancelled; its result has the races."""
    kernel.run(SETUP, timeout=40)
    source = "%%parallel -n 2 --async --check-races\ncounter[0] += 1"
    ended = kernel.begin(source)
    ended.wait()
    result = kernel.run("result = %parallel_result\nassert result.races[0].lines == (2, 2)", timeout=40)
    assert result.status == "ok", result.traceback
    source += "\nall_reduce(1)\nif rank == 0: counter[1] = 1\nimport time\ntime.sleep(60)"
    cancelled = kernel.begin(source)
    cancelled.wait()
    kernel.run("import time\nhandle = _\nwhile not counter[1]: time.sleep(0.01)\nhandle.cancel()", timeout=40)
    kernel.run("%parallel_result", timeout=40)
    for cell in (ended, cancelled):
        kernel.wait_until(lambda cell=cell: reports(cell), 20, "a report below the cell")
        assert [report.split("\n")[0] for report in reports(cell)] == ["1 data race"]
        assert RACE in reports(cell)[0]
    later = kernel.run("%%parallel --check-races\ncounter[rank] = 1")
    assert [display["text/plain"] for display in later.displays] == ["no race among 2 accesses"]
