"""``--check-races`` in a real kernel: the report stands below the cell."""

from __future__ import annotations

import pytest

from nbparallel.testing.kernel import Kernel

SETUP = "%load_ext nbparallel\nimport numpy as np\ncounter = np.zeros(2)\n%share counter"
RACE = "`counter[0]`: ranks 0 and 1 each read and wrote it on line 2"


@pytest.mark.by_turns
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
