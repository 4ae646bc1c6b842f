"""``%debug`` after a cell that failed on ranks, in JupyterLab: below its cell, until `q` or an interrupt."""

from __future__ import annotations

from pathlib import Path

from tests.widgets.lab.notebook_page import LabCell, NotebookPage

CELL = "%%parallel -n 4\nrows = half(rank)\nbarrier()"
FUNCTION = "def half(x):\n    rest = x - 2\n    return x / rest"
INTERRUPT = 'async () => { await jupyterapp.commands.execute("notebook:interrupt-kernel"); }'


def ask(cell: LabCell, command: str, answer: str) -> None:
    """Type a command into the box that is open below a cell, and wait for its answer and the next box."""
    box = cell.node.locator(".jp-Stdin-input").last
    box.fill(command)
    box.press("Enter")
    cell.wait_for_text(answer)
    cell.node.locator(".jp-Stdin-prompt").last.get_by_text("[rank 2] (Pdb)").wait_for()


def test_a_debugger_below_the_cell(notebook: NotebookPage, pictures: Path) -> None:
    """Commands and their answers stand in turn; the stop button ends it like ``q``, and the ranks go on."""
    notebook.run(FUNCTION)
    notebook.run(CELL)
    cell = notebook.begin("%debug")
    ask(cell, "p 'rest is', rest", "('rest is', 0)")
    ask(cell, "up", "> In[3](2)<module>()")
    ask(cell, "barrier()", "operations between ranks work only")
    cell.picture(pictures / "debugger.png")
    box = cell.node.locator(".jp-Stdin-input").last
    box.fill("q")
    box.press("Enter")
    text = cell.wait().text
    order = (
        "return x / rest",
        "p 'rest is'",
        "('rest is', 0)",
        "up",
        "rows = half(rank)",
        "barrier()",
        "***",
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places), text
    stopped = notebook.begin("%debug -r 0")
    stopped.node.locator(".jp-Stdin-input").wait_for()
    notebook.page.evaluate(INTERRUPT)
    assert "KeyboardInterrupt" in stopped.wait().text
    assert "Out[ranks 0-3]" in notebook.run("%parallel 1 + 1").text
