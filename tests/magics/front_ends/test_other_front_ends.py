"""Without a browser: nbclient, which papermill and nbconvert stand on, and a terminal's IPython."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

pytestmark = pytest.mark.time_limit(180)
IN_PROCESS = pytest.mark.may_leave("descriptor", reason="nbclient keeps the event loop that it has made")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels and IPython folders of their own."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def executed(*cells: str) -> Any:
    """Run a notebook of these cells to its end."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    return notebook


@IN_PROCESS
def test_nbclient_runs_it_and_saves_what_is_left() -> None:
    """Output in rank order, once; top-level await; nothing is left when the client ends the kernel."""
    notebook = executed(
        "%load_ext nbparallel\n%config NbParallel.welcome = False",
        "%%parallel -n 2 -o parts\nimport asyncio\nawait asyncio.sleep(0.3 * (1 - rank))\n"
        "print('rank', rank, flush=True)\nrank + 1",
        "parts.gather().sum()",
    )
    _, ran, summed = (cell["outputs"] for cell in notebook.cells)
    assert "".join(output["text"] for output in ran) == "[rank 0] rank 0\n[rank 1] rank 1\n"
    assert summed[0]["data"]["text/plain"] == repr(np.int64(3))


@pytest.mark.slow
@IN_PROCESS
def test_a_saved_panel_says_what_the_last_cell_did() -> None:
    """As text and as HTML without scripts, widgets or a word of a moment that is past."""
    notebook = executed(
        "%load_ext nbparallel\n%config NbParallel.welcome = False",
        "%parallel_panel",
        "%%parallel -n 2\nimport time\ntime.sleep(0.3 * rank)\nbarrier()",
    )
    figures, folds, folded = (output["data"] for output in notebook.cells[1]["outputs"])
    assert all(set(data) == {"text/plain", "text/html"} for data in (figures, folds, folded))
    for said in figures.values():
        assert "In[3] finished after" in said
        assert "no ranks are running" not in said
    assert "which rank waited for which" in folds["text/html"]
    assert "Memory of each rank" in folded["text/html"]
    assert "widgets" not in notebook.metadata


@pytest.mark.slow
@IN_PROCESS
def test_a_panel_above_output_that_is_put_in_order() -> None:
    """A cell that is cleared and printed again in rank order has its panel once, as it is then."""
    notebook = executed(
        "%load_ext nbparallel\n%config NbParallel.welcome = False",
        "%parallel_panel\n"
        "%parallel -n 2 __import__('time').sleep(0.5 * (1 - rank)) or print(rank, flush=True)",
    )
    figures, _, _, printed = notebook.cells[1]["outputs"]
    assert "In[2] finished after" in figures["data"]["text/plain"]
    assert printed["text"] == "[rank 0] 0\n[rank 1] 1\n"


@pytest.mark.slow
@IN_PROCESS
def test_nbclient_names_the_root_cause() -> None:
    """What its log shows, and papermill's: the error's own name and text, with rank and line."""
    with pytest.raises(CellExecutionError) as caught:
        executed("%load_ext nbparallel", "%%parallel -n 2\nx = 1\nif rank:\n    1 / 0\nbarrier()")
    shown = str(caught.value)
    assert re.search(r"ZeroDivisionError(\x1b\S+)?: division by zero", shown)
    assert "rank 1 failed: ZeroDivisionError on line 4" in shown
    assert shown.rstrip().endswith("ParallelError: ZeroDivisionError on rank 1, line 4 (rank 0 was released)")
    assert "run_cell_magic" not in shown


PAPERMILL = """
import sys, nbformat, nbclient

class Client(nbclient.NotebookClient):  # logs what comes, as papermill's does with --log-output
    def process_message(self, *args, **options):
        output = super().process_message(*args, **options)
        if output is not None and output.output_type == "stream":
            sys.stdout.write(output.text)
        return output

cells = [nbformat.v4.new_code_cell(cell) for cell in sys.argv[1:]]
Client(nbformat.v4.new_notebook(cells=cells), timeout=60, kernel_name="python3").execute()
"""


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize(
    ("name", "setting"),
    [("papermill", ""), ("program.py", "\n%config NbParallel.output = 'stream'")],
    ids=["command", "library"],
)
def test_papermills_log_holds_output_once(tmp_path: Path, name: str, setting: str) -> None:
    """Though it came in another order than that of the ranks: such a log keeps what is cleared elsewhere.

    The kernel knows the command by its name; a program that calls papermill sets what decision 5 says.
    """
    program = tmp_path / name
    program.write_text(PAPERMILL)
    cells = (
        f"%load_ext nbparallel\n%config NbParallel.welcome = False{setting}",
        "%%parallel -n 2\nimport time\ntime.sleep(0.3 * (1 - rank))\nprint('rank', rank, flush=True)\n"
        "time.sleep(0.3)\nrank * 10",
    )
    done = subprocess.run(
        [sys.executable, program, *cells],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
        check=True,
    )
    for line in ("rank 0", "rank 1", "Out[rank 0]: 0", "Out[rank 1]: 10"):
        assert done.stdout.count(line if line.startswith("Out") else f"] {line}") == 1, done.stdout


@pytest.mark.slow
def test_a_terminal_prints_the_same(tmp_path: Path) -> None:
    """Labelled, values too; an error is shown once, and IPython's end is the ranks'."""
    script = tmp_path / "session.ipy"
    script.write_text(
        "%load_ext nbparallel\n%config NbParallel.welcome = False\n"
        "%parallel -n 2 print('hello', rank)\n%parallel rank * 2\n"
        "get_ipython().run_cell_magic('parallel', '-r 1', 'x = 1\\n1 / 0')\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "IPython",
            "--no-banner",
            "--colors=NoColor",
            "--no-confirm-exit",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=os.environ,
        check=False,
    )
    shown = done.stdout.splitlines()  # nothing can be taken back there: the order is that of arrival
    assert sorted(shown[:2]) == ["[rank 0] hello 0", "[rank 1] hello 1"], done
    assert sorted(shown[2:4]) == ["Out[rank 0]: 0", "Out[rank 1]: 2"], done
    assert done.stdout.count("ZeroDivisionError: division by zero") == 1
    assert "run_cell_magic" not in done.stdout + done.stderr
    assert "nbparallel_magics" not in done.stdout + done.stderr
