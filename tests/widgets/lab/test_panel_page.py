"""The panel in JupyterLab: live, foldable by hand and by keyboard, right at every width, there when saved."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.widgets.lab.conftest import WIDTHS
from tests.widgets.lab.notebook_page import THEMES, LabCell, NotebookPage

STRAGGLER = """%%parallel -n 4
import os, time
while rank == 2 and not os.path.exists("go"):
    time.sleep(0.01)
total = all_reduce(rank)
"""
_CUT_OFF = """node => [...node.querySelectorAll(".nbp *")].filter(part => {
    const scrolled = part.closest(".nbp-scroll");
    const inside = node.querySelector(".nbp").getBoundingClientRect(), here = part.getBoundingClientRect();
    return here.width && !scrolled && (here.right > inside.right + 1 || here.left < inside.left - 1);
}).map(part => `${part.outerHTML.slice(0, 80)} ${part.getBoundingClientRect().right}`)"""
_BARS = """node => [...node.querySelectorAll("td.nbp-bar svg")].map(bar => {
    const box = bar.getBoundingClientRect();
    return [Math.round(box.left), Math.round(box.width)];
})"""
_HEADS = """node => {
    const words = [...node.querySelectorAll(".nbp-ranks thead th.nbp-n")].map(head => {
        const words = document.createRange();
        words.selectNodeContents(head);
        return words.getBoundingClientRect();
    });
    return words.slice(1).map((word, i) => Math.round(word.left - words[i].right));
}"""
_FOCUSED = "() => document.activeElement.textContent"


@pytest.fixture
def running(notebook: NotebookPage) -> tuple[LabCell, LabCell]:
    """Return the cell of a panel, and one in which three ranks wait for rank 2 until ``go`` is there."""
    notebook.run("%%parallel -n 4\nx = rank")
    panel = notebook.run("%parallel_panel")
    cell = notebook.begin(STRAGGLER)
    panel.wait_for_text("rank 2 holds the others up")
    return panel, cell


def _release(notebook: NotebookPage) -> None:
    (notebook.server.notebooks / "go").touch()


@pytest.fixture(autouse=True)
def closed(lab: object) -> object:
    """Remove the file ``go``."""
    yield
    (lab.notebooks / "go").unlink(missing_ok=True)  # type: ignore[attr-defined]


def _look_at(notebook: NotebookPage, panel: LabCell, name: str, pictures: Path) -> None:
    """Nothing may be cut off, nor may words touch, at any width in any theme; axe must find nothing."""
    for theme, width in itertools.product(THEMES, WIDTHS):
        notebook.resize(width)
        notebook.use_theme(theme)
        assert panel.output.evaluate(_CUT_OFF) == []
        bars = panel.output.evaluate(_BARS)
        assert len(bars) == 4
        assert len({tuple(bar) for bar in bars}) == 1
        assert bars[0][1] > width / 3
        panel.picture(pictures / f"{name}-{width}-{theme}.png")
        assert min(apart := panel.output.evaluate(_HEADS)) >= 8, (width, apart)
        if width == max(WIDTHS):
            assert panel.violations() == ""


@pytest.mark.time_limit(240)
def test_it_can_be_read_at_every_width(
    notebook: NotebookPage, running: tuple[LabCell, LabCell], pictures: Path
) -> None:
    """At 400, 700 and 1400 pixels nothing is cut off, all bars lie on one axis, and axe finds nothing."""
    panel, cell = running
    _look_at(notebook, panel, "running", pictures)
    _release(notebook)
    cell.wait()
    panel.wait_for_text("finished after")
    for fold in panel.output.locator("summary").all():
        fold.click()
    _look_at(notebook, panel, "ended", pictures)


def test_what_is_open_stays_open(notebook: NotebookPage, running: tuple[LabCell, LabCell]) -> None:
    """A fold that the keyboard opened keeps focus and state while figures change, and when the cell ends."""
    panel, cell = running
    folds = panel.output.locator("summary")
    memory = panel.output.get_by_text("Memory of each rank", exact=True)
    assert not memory.is_visible()
    folds.first.focus()
    notebook.page.keyboard.press("Enter")
    memory.wait_for(state="visible")
    shown = panel.text
    notebook.page.wait_for_function(
        "([node, shown]) => node.innerText !== shown", arg=[panel.output.element_handle(), shown]
    )
    assert memory.is_visible()
    assert notebook.page.evaluate(_FOCUSED) == folds.first.inner_text()
    _release(notebook)
    notebook.page.wait_for_function(
        "node => node.innerText.includes('finished after')", arg=panel.output.element_handle()
    )
    cell.wait()
    assert memory.is_visible()
    assert notebook.page.evaluate(_FOCUSED) == folds.first.inner_text()
    assert not panel.output.get_by_text("Waiting time").is_visible()
    folds.last.click()
    panel.output.get_by_text("Waiting time").wait_for(state="visible")


def test_it_is_live(notebook: NotebookPage, running: tuple[LabCell, LabCell]) -> None:
    """What it says of the time is at most a second old, also where a look takes long (and the browser)."""
    panel, cell = running
    texts = []
    until = time.monotonic() + 4
    while time.monotonic() < until:
        texts.append(panel.output.locator("caption").first.inner_text())
        time.sleep(0.05)
    assert len(set(texts)) >= 4, texts
    _release(notebook)
    cell.wait()


def test_a_page_that_was_loaded_again_says_that_it_stands_still(
    open_notebook: Callable[..., NotebookPage],
    notebook: NotebookPage,
    running: tuple[LabCell, LabCell],
    pictures: Path,
) -> None:
    """Outputs of a cell that runs do not reach another page; on the page that they reach nothing is said."""
    panel, cell = running
    stale = ".nbp-stale"
    until = time.monotonic() + 7
    while time.monotonic() < until:
        assert not panel.output.locator(stale).is_visible()
        time.sleep(0.1)
    notebook.save()
    again = open_notebook().cell(2)
    again.output.locator(stale).wait_for(state="visible")
    assert "%parallel_panel shows it as it is" in again.text
    again.picture(pictures / "stands-still.png")
    assert again.violations() == ""
    _release(notebook)
    cell.wait()
    assert panel.output.locator(stale).count() == 0


def test_the_button_interrupts(notebook: NotebookPage, running: tuple[LabCell, LabCell]) -> None:
    """Beside the panel is a button that interrupts the cell, while the kernel is busy."""
    panel, cell = running
    panel.output.get_by_role("button", name="interrupt").click()
    panel.wait_for_text("interrupted after")
    assert "KeyboardInterrupt" in cell.text


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_panel_opened_again(
    open_notebook: Callable[..., NotebookPage], notebook: NotebookPage, trusted: bool
) -> None:
    """Opened with a new kernel, trusted or not, it says what the last cell did, and nothing is missing."""
    notebook.run("%parallel_panel")
    notebook.run("%%parallel -n 2\ntotal = all_reduce(rank)")
    notebook.save()
    notebook.close()
    notebook.server.end_kernels()
    if not trusted:
        notebook.server.distrust(notebook.name)
    again = open_notebook()
    text = again.cell(1).text
    assert re.search(r"In\[3\] finished after", text)
    assert "not found" not in text
    assert "no ranks are running" not in text
