"""What a new user does first, in JupyterLab itself: cells, the panel, the timeline, save and open again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.widgets.lab.conftest import WIDTHS
from tests.widgets.lab.notebook_page import THEMES, NotebookPage

LATE_RANK = """%%parallel -n 2
import os, time
while rank == 1 and not os.path.exists("go"):
    time.sleep(0.01)
total = all_reduce(rank)
"""
MAP = """def square(item):
    while item == 5 and not os.path.exists("go"):
        time.sleep(0.01)
    return item**2
nbp.map(square, range(6))
"""


def _take_pictures(page: NotebookPage, name: str, folder: Path, cell: int) -> None:
    for width, theme in itertools.product(WIDTHS, THEMES):
        page.resize(width)
        page.use_theme(theme)
        assert page.cell(cell).picture(folder / f"{name}-{width}-{theme}.png").startswith(b"\x89PNG")


def test_a_cell_shows_each_rank(notebook: NotebookPage) -> None:
    """A cell's values and text stand below it under the name of their rank, equal ones once."""
    cell = notebook.run("%%parallel -n 2\nprint('same')\nrank * 10")
    assert "[ranks 0-1]" in cell.text
    assert cell.text.count("same") == 1
    for words in ("[rank 0]", "[rank 1]", "10"):
        assert words in cell.text
    assert cell.violations() == ""


def test_an_error_names_rank_and_line(notebook: NotebookPage) -> None:
    """The error of one rank stands below the cell with the line that the gutter shows."""
    cell = notebook.run("%%parallel -n 2\nif rank == 1:\n    1 / 0")
    assert "ZeroDivisionError on rank 1, line 3" in cell.text


def test_the_panel_lives_while_a_cell_runs(notebook: NotebookPage, pictures: Path) -> None:
    """The panel of an earlier cell shows who waits while another cell runs, and its end when it has ended."""
    notebook.run("%%parallel -n 2\nx = rank")
    panel = notebook.run("%parallel_panel")
    running = notebook.begin(LATE_RANK)
    panel.wait_for_text("rank 1 holds the others up")
    _take_pictures(notebook, "running", pictures, 2)
    (notebook.server.notebooks / "go").touch()
    running.wait()
    panel.wait_for_text("finished after")
    _take_pictures(notebook, "ended", pictures, 2)


def test_the_timeline(notebook: NotebookPage, pictures: Path) -> None:
    """The timeline of the last cell is a picture that a screen reader can read too."""
    notebook.run("%%parallel -n 2\nimport time\ntime.sleep(0.1 * rank)\ntotal = all_reduce(rank)")
    cell = notebook.run("%parallel_timeline")
    assert cell.output.locator("svg").count() >= 1
    _take_pictures(notebook, "timeline", pictures, 2)
    for theme in THEMES:
        notebook.use_theme(theme)
        assert cell.violations() == ""


def test_tables_on_a_narrow_page(notebook: NotebookPage, pictures: Path) -> None:
    """Title and notes are read without scrolling; a table that is too wide scrolls in its place."""
    notebook.run("import numpy as np\nx = np.zeros(1000)\nkept = {'a': 1}")
    notebook.run("%%parallel -n 2\ny = x.sum(), kept\nz = all_gather(np.zeros(100_000))")
    notebook.resize(400)
    for theme, magic in (("light", "segments"), ("dark", "who"), ("dark", "status"), ("light", "doctor")):
        notebook.use_theme(theme)
        cell = notebook.run(f"%parallel_{magic}")
        width = cell.output.evaluate("node => node.clientWidth")
        for part in ("p", "[role=group]"):
            boxes = cell.output.locator(part).evaluate_all(
                "nodes => nodes.map(n => [n.getBoundingClientRect().width, n.clientHeight])"
            )
            assert boxes
            for wide, high in boxes:
                assert wide <= width, f"{part} of {magic} is cut"
                assert part != "p" or high < 200, f"{part} of {magic} is a column of words"
        assert cell.violations() == "", magic
        cell.picture(pictures / f"{magic}-400-{theme}.png")


def test_a_map_shows_tqdm_s_bar(notebook: NotebookPage, pictures: Path) -> None:
    """The bar of `nbp.map` counts the items while ranks are at them; in the end text and results are left."""
    notebook.run("%parallel -n 2 pass\nimport os, time, nbparallel as nbp")
    running = notebook.begin(MAP)
    running.wait_for_text("5/6")
    (notebook.server.notebooks / "go").touch()
    running.wait()
    running.wait_for_text("6 of 6, ")
    assert "[0, 1, 4, 9, 16, 25]" in running.text
    running.picture(pictures / "bar.png")


@pytest.mark.parametrize("trusted", [True, False])
def test_a_saved_notebook_shows_it_again(
    open_notebook: Callable[..., NotebookPage], notebook: NotebookPage, trusted: bool
) -> None:
    """Opened again with a new kernel, also by somebody else, it shows what the cells have shown."""
    notebook.run("%%parallel -n 2\nprint(f'I am {rank}')\ntotal = all_reduce(rank)")
    notebook.run("%parallel_timeline")
    saved = notebook.save()
    notebook.close()
    notebook.server.end_kernels()
    if not trusted:
        notebook.server.distrust(notebook.name)
    again = open_notebook()
    assert [len(cell.outputs) for cell in saved.cells] == [
        len(again.cell(n).outputs) for n in range(len(saved.cells))
    ]
    for text in ("I am 0", "I am 1"):
        assert text in again.cell(1).text
    for text in ("on ranks 0-1", "of the ranks' time was computing", "waited"):
        assert text in again.cell(2).text
