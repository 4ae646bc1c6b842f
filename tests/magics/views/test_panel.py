"""`%parallel_panel`: text in a terminal, a live panel in a kernel, closed with the ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from tests.harness.kernel import Kernel

THREADS = "import threading; [t.name for t in threading.enumerate() if t.name == 'nbparallel-panel']"


def test_in_a_terminal(notebook: Any) -> None:
    """In a terminal it is a look at this moment, and says why it does not go on."""
    out = notebook.run("%parallel_panel")
    assert out.error is None
    assert NO_RANKS in out.outputs[0].data["text/plain"]
    assert "(as it is now: a panel that goes on needs a notebook)" in out.stdout
    out = notebook.run("%parallel_panel --close")
    assert "no panel is open" in str(out.error)


def _updates(kernel: Kernel) -> list[str]:
    """Return what the figures of the panel became, one after the other."""
    updates = [m.content for m in kernel.messages if m.kind == "update_display_data"]
    figures = [each for each in updates if each["transient"]["display_id"].endswith("-figures")]
    return [each["data"]["text/plain"] for each in figures]


@pytest.mark.every_kernel
@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_live_panel(kernel: Kernel) -> None:
    """It follows a cell that runs, from a thread that ends with the ranks; loading imports nothing of it."""
    kernel.run("%load_ext nbparallel\nimport sys")
    loaded = "[m for m in sys.modules if 'widgets.panel_view' in m or m == 'ipywidgets']"
    assert kernel.run(loaded).result == "[]"
    shown = kernel.run("%parallel_panel", timeout=60)
    assert shown.status == "ok", shown.traceback
    assert all(set(display) == {"text/plain", "text/html"} for display in shown.displays)
    assert NO_RANKS in shown.displays[0]["text/plain"]

    def said(text: str) -> bool:
        return any(text in update for update in _updates(kernel))

    cell = kernel.begin("%%parallel -n 2\nimport time\ntime.sleep(1.5 * rank)\nall_reduce(1);")
    kernel.wait_until(lambda: said("rank 1 holds the others up"), 60, "word of the wait")
    assert cell.wait(60).status == "ok"
    assert re.search(r"In\[4\] finished after 1\.[5-9] s", _updates(kernel)[-1])
    assert kernel.run(THREADS).result == "['nbparallel-panel']"
    assert kernel.run("%%parallel\n1 / (1 - rank)").status == "error"
    assert _updates(kernel)[-1].startswith("rank 1 failed on line 2\nIn[6] failed after ")
    kernel.run("%parallel_stop")
    assert kernel.run(THREADS).result == "[]"
    assert kernel.run("%parallel_panel\n%parallel_panel --close").status == "ok"
    assert kernel.run(THREADS).result == "[]"


@pytest.mark.slow
def test_a_panel_follows_an_async_cell(kernel: Kernel) -> None:
    """The kernel is idle, the panel goes on until the ranks have finished."""
    kernel.run("%load_ext nbparallel")
    kernel.run("%parallel_panel")
    kernel.run("%%parallel -n 2 --async\nimport time\ntime.sleep(0.7)", timeout=60)
    kernel.wait_until(lambda: any("finished after" in text for text in _updates(kernel)), 15, "the end")
