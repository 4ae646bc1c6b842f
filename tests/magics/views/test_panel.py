"""`%parallel_panel`: text where there are no widgets, a live panel in a kernel, closed with the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from nbparallel.testing.kernel import Kernel

WIDGET = "application/vnd.jupyter.widget-view+json"
THREADS = "import threading; [t.name for t in threading.enumerate() if t.name == 'nbparallel-panel']"


def test_without_widgets(notebook: Any) -> None:
    """In a terminal it is a look at this moment, and says why it does not go on."""
    out = notebook.run("%parallel_panel")
    assert out.error is None
    assert NO_RANKS in out.outputs[0].data["text/plain"]
    assert "(as it is now: a panel that goes on needs a notebook and ipywidgets)" in out.stdout
    out = notebook.run("%parallel_panel --close")
    assert "no panel is open" in str(out.error)


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_live_panel(kernel: Kernel) -> None:
    """It follows a cell that runs, from a thread that ends with the ranks; loading imports no widgets."""
    kernel.run("%load_ext nbparallel\nimport sys")
    assert kernel.run("[m for m in sys.modules if 'widgets' in m]").result == "[]"
    shown = kernel.run("%parallel_panel", timeout=60)
    assert shown.status == "ok", shown.traceback
    (display,) = shown.displays
    assert WIDGET in display
    assert "no ranks are running" in display["text/plain"]

    def said(text: str) -> bool:
        states = [m.content["data"].get("state", {}) for m in kernel.messages if m.kind == "comm_msg"]
        return any(text in str(state.get("value", "")) for state in states)

    cell = kernel.begin("%%parallel -n 2\nimport time\ntime.sleep(1.5 * rank)\nall_reduce(1);")
    kernel.wait_until(lambda: said("waiting in all_reduce for rank 1, line 4"), 60, "word of the wait")
    assert cell.wait(60).status == "ok"
    kernel.wait_until(lambda: said("In[4] took"), 15, "a last look")
    assert kernel.run(THREADS).result == "['nbparallel-panel']"
    kernel.run("%parallel_stop")
    assert kernel.run(THREADS).result == "[]"
    updates = [m.content["data"] for m in kernel.messages if m.kind == "update_display_data"]
    assert set(updates[-1]) == {"text/plain", "text/html"}
    assert "In[4] took" in updates[-1]["text/plain"]
    assert kernel.run("%parallel_panel\n%parallel_panel --close").status == "ok"
    assert kernel.run(THREADS).result == "[]"
