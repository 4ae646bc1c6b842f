"""Every notebook runs from top to bottom in a real kernel, by the script behind `make demo`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
import pytest

from nbparallel.testing.waiting import wait_until
from tests.docs.notebooks.lesson_rules import tags
from tests.docs.notebooks.wrong_answers import WRONG
from tests.harness.kernel.kernel_fixtures import old_ipykernel

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = NOTEBOOKS[1:]
"""Without the one that checks the set-up."""
SECONDS = 180
"""A watchdog: a notebook takes less than 60 s on two cores that do nothing else."""
LEAVE_SECONDS = 5.0
"""A kernel that takes long to end is killed by its client; then its supervisor removes what it left."""


_PENDING = re.compile(
    r"^Task was destroyed but it is pending!\ntask: <Task pending .*dispatch_control.*\n?", re.MULTILINE
)
"""Of ipykernel 6 if it is ended while it waits for the notebook's processes, which takes it up to 29 s."""


@dataclass(frozen=True)
class Run:
    """What the demo script made of a notebook, and which files the notebook left."""

    done: subprocess.CompletedProcess[str]
    pictures: Path
    left: list[str]

    def check(self) -> None:
        """Fail if a cell did not keep to its plan, wrote to stderr, or left a file."""
        done = self.done
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert _PENDING.sub("", done.stderr).strip() == ""
        assert self.left == []


def demo(notebook: Path, pictures: Path, path: Path | None = None) -> Run:
    """Run the demo script on a copy of a notebook in a folder of its own; `path` has another ipykernel."""
    with tempfile.TemporaryDirectory(prefix="nbp-") as short:  # sockets below it: their paths are limited
        temporary = Path(short) / "t"
        temporary.mkdir()
        copied = Path(shutil.copy(notebook, short))
        given = {temporary, copied}
        if (solutions := notebook.parent / "solutions" / notebook.name).exists():
            (folder := Path(short) / "solutions").mkdir()
            given |= {folder, Path(shutil.copy(solutions, folder))}
        search = [str(path)] if path else []
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(pictures / "torch"),  # torch's own, made by torch.optim
            "PYTHONPATH": os.pathsep.join([*search, os.environ["PYTHONPATH"]]),
        }
        command = [
            sys.executable,
            str(ROOT / "notebooks/tools/run.py"),
            str(copied),
            "--pictures",
            str(pictures),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        with contextlib.suppress(AssertionError):  # a test of its own says so
            wait_until(lambda: not _left(Path(short)) - given, seconds=LEAVE_SECONDS)
        left = _left(Path(short)) - given
    return Run(done, pictures, sorted(map(str, left)))


def _left(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_there_are_notebooks() -> None:
    """The tests below run something."""
    assert NOTEBOOKS


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Run]]:
    """Run a notebook once with the installed ipykernel, however many tests look at it."""

    @cache
    def run(notebook: Path) -> Run:
        return demo(notebook, tmp_path_factory.mktemp(notebook.stem))

    yield run
    run.cache_clear()


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=5)
@pytest.mark.time_limit(SECONDS)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_its_promises(notebook: Path, run_of: Callable[[Path], Run]) -> None:
    """No cell raises but the planned mistakes, which raise what is planned; asserts hold; no file stays."""
    run_of(notebook).check()


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.time_limit(SECONDS)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_its_promises_with_ipykernel_6(notebook: Path, tmp_path: Path) -> None:
    """The same with the older ipykernel."""
    if not old_ipykernel().is_dir():
        pytest.skip(f"ipykernel 6.31 is not in {old_ipykernel()}; `make test` puts it there")
    demo(notebook, tmp_path, old_ipykernel()).check()


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(SECONDS)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_student_s_copy_runs_as_it_is(notebook: Path, tmp_path: Path) -> None:
    """A copy has no link to elsewhere; what is not done yet fails in the checks, and nowhere else."""
    script = [sys.executable, str(ROOT / "notebooks/tools/student.py"), str(tmp_path), str(notebook)]
    subprocess.run(script, check=True, capture_output=True, timeout=SECONDS)
    path = tmp_path / notebook.name
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert not [text for text in texts if re.search(r"\]\((?!http|#)", text) or "solution" in text]
    demo(path, tmp_path).check()


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=3)
@pytest.mark.time_limit(SECONDS)
@pytest.mark.parametrize("notebook", LESSONS, ids=lambda path: path.stem)
def test_wrong_answers_are_told_what_is_wrong(notebook: Path, tmp_path: Path) -> None:
    """Each exercise refuses what students typically write, with words that say what is missing."""
    content = nbformat.read(notebook, as_version=4)
    parts = [cell for cell in content.cells if {"start", "check"} & set(tags(cell))]
    exercises = list(zip(parts[::2], parts[1::2], strict=True))
    lesson = next(i for i, cell in enumerate(content.cells) if "exercise" in tags(cell))
    tried = []
    for (start, check), answers in zip(exercises, WRONG[notebook.stem], strict=True):
        assert len(answers) > 3, "the cell as it is, and three others"
        for source, words in answers:
            own = words.startswith("!")
            tried.append(_raising(source or start.source, words[1:] if own else ""))
            if not own:
                tried.append(_raising(check.source, words))
    needs = [
        cell.metadata.nbparallel["needs"]
        for cell in content.cells
        if "needs" in cell.metadata.get("nbparallel", {})
    ]
    for cell in tried if needs else ():
        if "nbparallel" in cell.metadata:
            cell.metadata.nbparallel["needs"] = needs[0]
    content.cells = [*content.cells[:lesson], *tried]
    path = tmp_path / "wrong.ipynb"
    nbformat.write(content, path)
    demo(path, tmp_path).check()


def _raising(source: str, words: str) -> nbformat.NotebookNode:
    """Return a cell that raises an error with these words, or nothing."""
    plan = {"tags": ["raises-exception"], "nbparallel": {"raises": words}} if words else {}
    return nbformat.v4.new_code_cell(source, metadata=plan)


@pytest.mark.time_limit(120)
def test_the_first_notebook_shows_what_it_is_about(run_of: Callable[[Path], Run]) -> None:
    """`make demo` shows four ranks, one that forgets a call, and what each rank recognises."""
    run = run_of(ROOT / "notebooks/01-hello-ranks.ipynb")
    text = run.done.stdout
    for rank in range(4):
        assert f"hello from rank {rank} of 4" in text
    assert "1 raised as planned" in text
    assert "CollectiveMismatchError" in text
    assert list(run.pictures.glob("*.png"))


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_the_notebook_on_torch_ends_well_without_torch(tmp_path: Path) -> None:
    """It says in a line that torch is missing; its cells do nothing."""
    hides = "import importlib.util as u\nfind = u.find_spec\n"
    hides += "u.find_spec = lambda n: None if n == 'torch' else find(n)"
    (tmp_path / "sitecustomize.py").write_text(hides)
    run = demo(ROOT / "notebooks/10-torch.ipynb", tmp_path, tmp_path)
    run.check()
    assert "torch is not installed" in run.done.stdout
    assert "raised as planned" not in run.done.stdout


def _notebook(path: Path, *sources: str, raises: str = "") -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if raises:
        cells[-1].metadata = {"tags": ["raises-exception"], "nbparallel": {"raises": raises}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_the_script_fails_loudly(tmp_path: Path) -> None:
    """A cell that raises ends the run with status 1, its traceback in plain text; later cells do not run."""
    done = demo(_notebook(tmp_path / "bad.ipynb", "print('first')", "1 / 0", "print('third')"), tmp_path).done
    assert done.returncode == 1
    assert "first\n" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "\x1b" not in done.stdout
    assert "third\n" not in done.stdout.replace("print('third')", "")
    assert "FAILED after 1 cells" in done.stderr


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_a_race_fails_the_check_of_its_lesson(tmp_path: Path) -> None:
    """Who leaves the race of the exercise in is told so, even where no addition was lost."""
    cells = nbformat.read(ROOT / "notebooks/02-shared-memory.ipynb", as_version=4).cells
    start = next(i for i, cell in enumerate(cells) if "start" in tags(cell) and "# a race" in cell.source)
    check = next(cell for cell in cells[start:] if "check" in tags(cell))
    begin = """%load_ext nbparallel
import nbparallel as nbp
import numpy as np
%config NbParallel.n = 2
grey = np.full((2, 4), 255)
counter = nbp.zeros(1, dtype=int)"""
    path = _notebook(
        tmp_path / "race.ipynb", begin, cells[start].source, check.source, raises="AssertionError"
    )
    demo(path, tmp_path).check()
