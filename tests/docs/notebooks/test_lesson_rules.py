"""The notebooks keep the rules of teaching notebooks, and the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from docs.site import course_pictures
from tests.docs.notebooks.lesson_rules import problems, tags
from tests.docs.test_words import offences

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = NOTEBOOKS[1:]
"""Without the one that checks the set-up."""
COURSE = ROOT / "notebooks/README.md"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    """Head, lengths, questions, mistake, exercises, key points; no outputs in git."""
    assert not (found := problems(nbformat.read(path, as_version=4))), "\n".join(found)


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_each_exercise_has_a_solution(path: Path) -> None:
    """The notebook of solutions has a heading and a cell for each exercise, in their order."""
    lesson_cells = nbformat.read(path, as_version=4).cells
    titles = [
        re.search(r"^\*\*(\d\. .+?)\.?\*\*", cell.source, re.MULTILINE)
        for cell in lesson_cells
        if "exercise" in tags(cell)
    ]
    solutions = nbformat.read(path.parent / "solutions" / path.name, as_version=4).cells[1:]
    assert [cell.source.lstrip("# ") for cell in solutions[::2]] == [found and found[1] for found in titles]
    assert all("solution" in tags(cell) for cell in solutions[1::2])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_field_s_words(path: Path) -> None:
    """No text, and no code, holds a word of the list that pages avoid."""
    cells = nbformat.read(path, as_version=4).cells
    found = [bad for cell in cells for bad in offences(cell.source)]
    assert not found, "\n".join(found)


def test_the_lecturer_s_page_has_every_notebook() -> None:
    """Each notebook has its row, with the minutes that its head names."""
    rows = dict(re.findall(r"^\| \[[^]]+\]\((.+?)\) \| (\d+) \|", COURSE.read_text(), re.MULTILINE))
    assert sorted(rows) == [path.name for path in LESSONS]
    for path in LESSONS:
        head = nbformat.read(path, as_version=4).cells[0].source
        assert f"{rows[path.name]} minutes" in head, path.name


def test_the_lecturer_s_page_uses_the_field_s_words() -> None:
    """As the notebooks do."""
    assert not (found := offences(COURSE.read_text())), "\n".join(found)


def test_every_lesson_has_its_picture() -> None:
    """The lecturer's page shows a small one for each, and no other."""
    shown = re.findall(r"!\[[^]]+\]\((\S+)\)", COURSE.read_text())
    pictures = [(COURSE.parent / path).resolve() for path in shown]
    assert [path.stem for path in pictures] == [path.stem for path in LESSONS]
    assert sorted(pictures) == sorted(course_pictures.FOLDER.iterdir())
    assert all(0 < path.stat().st_size <= course_pictures.MOST_BYTES for path in pictures)
