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
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")


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


def test_links_lead_somewhere() -> None:
    """A link of a notebook, or of the lecturer's page, names a file, and a heading where it names one."""
    pages = {path: [cell.source for cell in nbformat.read(path, as_version=4).cells] for path in NOTEBOOKS}
    pages[COURSE] = [COURSE.read_text()]
    links = [(path, found) for path, texts in pages.items() for text in texts for found in LINK.findall(text)]
    assert len(links) > 20
    wrong = []
    for path, (file, heading) in links:
        target = path.parent / file if file else path
        if not target.exists() or (heading and heading not in headings(target)):
            wrong.append(f"{path.name}: {file}#{heading}")
    assert not wrong, "\n".join(wrong)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    lines = [line.lstrip("# ") for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}


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
