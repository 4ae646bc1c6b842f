"""Where the time goes, in JupyterLab: a profile and a timeline, right in every theme and at both widths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.widgets.lab.notebook_page import THEMES, NotebookPage

CELL = """%%parallel -n 4 --profile
import numpy as np, time
a = np.random.default_rng(rank).random(300_000)
table = [i ** 0.5 for i in range(400_000)]
for step in range(40):
    a = np.sort(a)[::-1] + smooth(a)
    if rank == 2:
        time.sleep(0.01)
    total = all_reduce(a.sum())
everything = all_gather(np.ones(400_000) * rank)
"""
_CUT_OFF = """node => [...node.querySelectorAll(".nbp-profile *, .nbp-timeline *")].filter(part => {
    const inside = node.querySelector(".nbp").getBoundingClientRect(), here = part.getBoundingClientRect();
    return here.width && !part.closest(".nbp-scroll") && (here.right > inside.right + 1);
}).map(part => part.outerHTML.slice(0, 120))"""

_SCROLLED = """node => [...node.querySelectorAll(".nbp-scroll")].filter(
    part => part.scrollWidth > part.clientWidth + 1).length"""


@pytest.mark.parametrize("theme", THEMES)
def test_it_can_be_read(notebook: NotebookPage, theme: str, pictures: Path) -> None:
    """Nothing is cut off but code that is too wide, which scrolls; axe-core finds nothing."""
    notebook.run("import numpy as np\ndef smooth(x):\n    y = np.cumsum(x)\n    return y / y[-1]")
    cells = {"profile": notebook.run(CELL), "timeline": notebook.run("%parallel_timeline")}
    notebook.use_theme(theme)
    for width in (1400, 800):
        notebook.resize(width)
        for name, cell in cells.items():
            cell.output.scroll_into_view_if_needed()
            cell.picture(pictures / f"{name}-{theme}-{width}.png")
            assert cell.output.evaluate(_CUT_OFF) == []
            assert cell.violations() == "", (name, width)
        code = cells["profile"].output.get_by_text("table = [i ** 0.5")
        assert width < 1400 or cells["profile"].output.evaluate(_SCROLLED) == 0
        assert (box := code.bounding_box()) is not None
        assert box["x"] < 0.6 * width, "there is room for the code"
    assert "% of the ranks' time was computing" in cells["profile"].text
