"""Pictures of what ranks hold in JupyterLab: right in every theme and at every width, there when saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbparallel_widgets.sheet import contrast
from tests.widgets.lab.conftest import WIDTHS
from tests.widgets.lab.notebook_page import THEMES, LabCell, NotebookPage

CELLS = {
    "all_to_all": "%%parallel --draw x,y\ny = all_to_all(x)",
    "all_reduce": "%%parallel --draw x,k\nall_reduce(x)",
    "now": "%parallel_draw m z long words nothing",
}
_SIZES = """node => [...node.querySelectorAll("svg[role=img]")].map(picture => {
    const inside = node.getBoundingClientRect(), here = picture.getBoundingClientRect();
    return [here.width / picture.viewBox.baseVal.width, here.right - inside.right, here.height];
})"""
_OUTSIDE = """node => [...node.querySelectorAll("svg[role=img] :is(text, rect)")].filter(part => {
    const whole = part.closest("svg").getBoundingClientRect(), here = part.getBoundingClientRect();
    return here.right > whole.right + 1 || here.bottom > whole.bottom + 1 || here.left < whole.left - 1;
}).map(part => part.outerHTML.slice(0, 120))"""
_CRAMPED = """node => [...node.querySelectorAll("svg[role=img] g")].filter(part => {
    const [box, text] = [part.querySelector("rect"), part.querySelector("text")];
    return text.getBoundingClientRect().width > box.getBoundingClientRect().width;
}).map(part => part.textContent)"""
_COLOURS = """node => {
    let page = node;
    while (/, 0\\)$/.test(getComputedStyle(page).backgroundColor)) page = page.parentElement;
    const text = node.querySelector("svg[role=img]");
    return [getComputedStyle(text).color, getComputedStyle(page).backgroundColor];
}"""
SMALLEST = 12
"""Letters of a picture at its own size, in pixels."""


def _colour(text: str) -> str:
    """Return ``rgb(1, 2, 3)`` as ``#010203``."""
    return "#" + "".join(f"{int(part):02x}" for part in text.partition("(")[2].rstrip(")").split(",")[:3])


@pytest.fixture
def cells(notebook: NotebookPage) -> dict[str, LabCell]:
    """Return cells with pictures of many kinds of values."""
    notebook.run("import numpy as np\nz = np.arange(2000.)")
    notebook.run(
        "%%parallel -n 4\nimport numpy as np\nx = 10 * rank + np.arange(4)\nk = [rank, None]\n"
        "m = np.eye(4) * rank + 0.5\nlong = np.linspace(rank, 7, 40)\nwords = {'a': 1}\nz[0]"
    )
    return {name: notebook.run(cell) for name, cell in CELLS.items()}


@pytest.mark.parametrize("theme", THEMES)
def test_a_picture_in_every_theme_and_width(
    notebook: NotebookPage, cells: dict[str, LabCell], theme: str, pictures: Path
) -> None:
    """Nothing is cut off or too small, text stands out from the page, and axe-core finds nothing."""
    notebook.use_theme(theme)
    for width in WIDTHS:
        notebook.resize(width)
        for name, cell in cells.items():
            cell.output.scroll_into_view_if_needed()
            cell.picture(pictures / f"draw-{name}-{theme}-{width}.png")
            ((scale, over, height),) = cell.output.evaluate(_SIZES)
            assert over <= 0, (name, width)
            assert height > 100
            assert scale == pytest.approx(1, abs=0.01) if width > 400 else scale * SMALLEST >= 7
            assert cell.output.evaluate(_OUTSIDE) == []
            assert cell.output.evaluate(_CRAMPED) == []
            text, page = cell.output.evaluate(_COLOURS)
            assert contrast(_colour(text), _colour(page)) >= 4.5
            assert cell.violations() == "", (name, width)


def test_pictures_of_a_saved_notebook(notebook: NotebookPage, cells: dict[str, LabCell]) -> None:
    """The file has picture and text; a cell in the background has its picture when it has ended."""
    cell = notebook.run("%%parallel --async --draw x\nx = x * 2")
    cell.output.locator("svg[role=img]").wait_for()
    saved = notebook.save()
    outputs = [output for part in saved["cells"] for output in part["outputs"] if "data" in output]
    found = [output["data"] for output in outputs if "<svg" in str(output["data"].get("text/html"))]
    assert len(found) == len(CELLS) + 1
    assert all("rank 0" in str(data["text/plain"]) for data in found)
