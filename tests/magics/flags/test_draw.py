"""`--draw` and `%parallel_draw`: pictures in a notebook, in a terminal, in the file that is saved."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from nbparallel_magics import flags
from tests.harness.kernel import Kernel


def test_names_reach_the_session(notebook: Any) -> None:
    """On every magic that runs code; without the flag nothing is asked for."""
    for line in (
        "%%parallel --draw x,y\nx", "%parallel --draw x,y x", "%%rank 0 --draw x,y\nx", "%rank 0 --draw=x,y x"
    ):  # fmt: skip
        assert notebook.run(line).error is None
        assert notebook.session.calls[-1].draw == ("x", "y")
    notebook.run("%%parallel\nx")
    assert not hasattr(notebook.session.calls[-1], "draw")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%parallel_draw x", "no ranks"),
        ("%parallel_draw", "which variables? name them, as in %parallel_draw x, y"),
        ("%parallel_draw 3", "'3' is no name of a variable"),
        ("%parallel_draw --all x", "unknown flag --all"),
        ("%parallel --draw x[0] x", "'x[0]' is no name of a variable"),
    ],
)
def test_mistakes_are_said_in_a_line(notebook: Any, line: str, words: str) -> None:
    """No ranks, no name, what is no name, an unknown flag."""
    error = notebook.run(line).error
    assert type(error).__name__ == "UsageError"
    assert words in str(error)
    assert "\n" not in str(error)


def test_help() -> None:
    """Flags and an example are in the help of the magics."""
    assert "--draw NAMES" in flags.CELL.format_help()
    text = flags.DRAW.format_help()
    assert text.startswith("usage: %parallel_draw [-r SPEC] NAME [NAME ...]")
    assert "Example:\n\n    %parallel_draw x, y" in text


@pytest.mark.slow
def test_in_a_kernel(shared_kernel: Kernel) -> None:
    """A cell has its picture below its output, also one that fails; `%parallel_draw` has it now."""
    run = shared_kernel.run
    run("%load_ext nbparallel\nimport numpy as np\nunsent = 1")
    run("%%parallel -n 2\nx = 10 * rank + np.arange(2)", timeout=60)
    outcome = run("%%parallel --draw x,y\ny = all_to_all(x)\nprint('here')")
    assert "here" in outcome.stdout
    (picture,) = outcome.displays
    assert picture["text/html"].count("<svg") == 1
    assert [line.split("  ")[-1] for line in picture["text/plain"].splitlines()[4:]] == ["ranks 0-1"] * 2
    failed = run("%%parallel --draw x\nx += 1\nbarrier()\nif rank: raise ValueError('planned')")
    assert failed.ename == "ParallelError" or "planned" in failed.traceback
    assert "1 2" in failed.displays[0]["text/plain"]
    quiet = run("%%rank 1 --draw x --quiet\nx")
    assert quiet.stdout == ""
    assert "unchanged" in quiet.displays[0]["text/plain"]
    now = run("%parallel_draw -r 1 x, unsent")
    assert now.displays[0]["text/plain"].startswith("x, unsent on rank 1 now")
    assert "unsent of the notebook reaches the ranks with the first cell that uses it" in now.stdout
    run("%%parallel --async --draw x\nx *= 2")
    assert "22 24" in run("%parallel_result").displays[-1]["text/plain"]
    assert run("%parallel_timeline").displays[0]["text/plain"].split("\n")[1].startswith("In[")


@pytest.mark.slow
@pytest.mark.may_leave("descriptor", reason="nbclient keeps the event loop that it has made")
def test_the_saved_notebook(tmp_path: Any) -> None:
    """Nbclient's file has the picture as SVG and as text."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    cells = ["%load_ext nbparallel", "%%parallel -n 2 --draw x\nx = 10 * rank + 1", "%parallel_stop"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    saved = nbformat.reads(nbformat.writes(notebook), as_version=4)
    shown = [output.data for output in saved.cells[1].outputs if output.output_type == "display_data"]
    (picture,) = [data for data in shown if "<svg" in data["text/html"]]
    assert picture["text/plain"].splitlines()[2].split() == ["x", "rank", "0", "not", "defined", "1", "new"]
