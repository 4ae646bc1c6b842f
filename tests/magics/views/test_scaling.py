"""``%%parallel --scaling`` in a notebook."""

from __future__ import annotations

import pytest

from tests.harness.kernel import Kernel

pytestmark = pytest.mark.time_limit(90)


@pytest.mark.slow
def test_a_cell_is_measured_on_ranks_of_its_own(shared_kernel: Kernel) -> None:
    """It sees the notebook's names and none of the ranks'; shown as picture and text, and again."""
    kernel = shared_kernel
    kernel.run("%load_ext nbparallel\n%parallel -n 2 held = rank\nseconds = 0.2")
    outcome = kernel.run(
        "%%parallel --scaling 1,2\nimport time\ntime.sleep(seconds / world_size)\nprint(rank)"
    )
    assert outcome.status == "ok", outcome.traceback
    shown = outcome.displays[-1]
    assert 'aria-label="speed-up by ranks, 1: 1.00, 2: ' in shown["text/html"]
    assert shown["text/plain"].split()[:2] == ["ranks", "time"]
    assert "the quickest of 3 runs each" in shown["text/plain"]
    assert kernel.run("%parallel -o kept held\nassert kept == [0, 1]").status == "ok"
    assert kernel.run("found = %parallel_scaling\nassert found.counts == (1, 2)").status == "ok"
    missing = kernel.run("%%parallel --scaling 1\nheld")
    assert "fresh ranks" in "".join(missing.traceback)
    refused = kernel.run("%%parallel -n 2 --scaling 1\n1")
    assert refused.ename == "UsageError"
    assert "ranks of its own; only --share" in refused.evalue
