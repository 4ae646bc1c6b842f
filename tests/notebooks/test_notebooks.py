"""Every notebook runs from top to bottom in a real kernel, by the script behind `make demo`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def demo(notebook: Path, pictures: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo script on a notebook."""
    command = [sys.executable, str(ROOT / "notebooks/run.py"), str(notebook), "--pictures", str(pictures)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_there_are_notebooks() -> None:
    """The test below runs something."""
    assert NOTEBOOKS


@dataclass(frozen=True)
class Run:
    """What the demo script made of a notebook."""

    done: subprocess.CompletedProcess[str]
    pictures: Path


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Run]:
    """Run a notebook once, however many tests look at it."""

    @cache
    def run(notebook: Path) -> Run:
        pictures = tmp_path_factory.mktemp(notebook.stem)
        return Run(demo(notebook, pictures), pictures)

    return run


@pytest.mark.slow
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_its_promises(notebook: Path, run_of: Callable[[Path], Run]) -> None:
    """No cell raises: a notebook asserts what it claims.  It leaves no word on stderr."""
    done = run_of(notebook).done
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "no cell raised" in done.stdout
    assert done.stderr.strip() == ""


@pytest.mark.time_limit(120)
def test_the_first_notebook_shows_what_it_is_about(run_of: Callable[[Path], Run]) -> None:
    """`make demo` shows four ranks, the same accuracy five times, and two pictures."""
    run = run_of(ROOT / "notebooks/01-hello-ranks.ipynb")
    text = run.done.stdout
    for rank in range(4):
        assert f"hello from rank {rank} of 4" in text
        assert f"rank {rank}:  94.9%" in text
    assert text.count("] I put in ") == 4, "printed once each, after the ranks were put in order"
    assert "everybody got 60" in text
    assert "Traceback" not in text
    assert len(list(run.pictures.glob("*.png"))) == 2


def _notebook(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.time_limit(60)
def test_the_script_fails_loudly(tmp_path: Path) -> None:
    """A cell that raises ends the run with status 1, its traceback in plain text; later cells do not run."""
    done = demo(_notebook(tmp_path / "bad.ipynb", "print('first')", "1 / 0", "print('third')"), tmp_path)
    assert done.returncode == 1
    assert "first\n" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "\x1b" not in done.stdout
    assert "third\n" not in done.stdout.replace("print('third')", "")
    assert "FAILED after 1 cells" in done.stderr


@pytest.mark.time_limit(60)
def test_the_script_prints_what_a_cell_shows_in_the_end(tmp_path: Path) -> None:
    """Output that a cell cleared and printed again is there once."""
    source = "from IPython.display import clear_output\nprint('draft')\nclear_output()\nprint('final')"
    done = demo(_notebook(tmp_path / "clear.ipynb", source), tmp_path)
    assert done.returncode == 0
    shown = done.stdout.partition("print('final')")[2]
    assert "draft" not in shown
    assert shown.count("final") == 1
