"""The notebooks keep the rules of teaching notebooks, and the field's words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.docs.notebooks.lesson_rules import METADATA, RULES, problems, tags
from tests.docs.test_words import offences

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COURSE = ROOT / "notebooks/README.md"
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_the_rules(path: Path) -> None:
    """Head, lengths, questions, mistake, exercises, key points; no outputs in git."""
    assert not (found := problems(nbformat.read(path, as_version=4))), "\n".join(found)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_uses_the_field_s_words(path: Path) -> None:
    """No text, and no code, holds a word of the list that pages avoid."""
    cells = nbformat.read(path, as_version=4).cells
    found = [bad for cell in cells for bad in offences(cell.source)]
    assert not found, "\n".join(found)


def lesson() -> Any:
    """Return a notebook that keeps every rule."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell

    def exercise() -> list[Any]:
        hidden = {"tags": ["solution", "hide-input"], "jupyter": {"source_hidden": True}}
        return [
            text("### Exercise", metadata={"tags": ["exercise"]}),
            code("x = 0", metadata={"tags": ["start"]}),
            code("x = 1", metadata=hidden),
            code("assert x == 1", metadata={"tags": ["check"]}),
        ]

    planned = {"tags": ["raises-exception"], "nbparallel": {"raises": "ValueError"}}
    cells = [
        text("# Title\n\n**You will do** a\n\n**You will learn** b\n\n**You need** c"),
        text("**What will happen?**"),
        code("x = True"),
        text("**What will happen?**"),
        code("int('one')", metadata=planned),
        code("assert x"),
        text("## Key points\n\n* a\n* b\n* c"),
        *exercise(),
        *exercise(),
        code("%parallel_stop"),
    ]
    return nbformat.v4.new_notebook(cells=cells, metadata=copy.deepcopy(METADATA))


def _run(notebook: Any) -> None:
    notebook.cells[2].execution_count = 1


def _untitled(notebook: Any) -> None:
    notebook.cells[0].source = notebook.cells[0].source.replace("**You need**", "")


def _long(notebook: Any) -> None:
    notebook.cells[2].source += "\n" * 12 + "assert 1"


def _wide(notebook: Any) -> None:
    notebook.cells[2].source += "  # " + "wide " * 20


def _silent(notebook: Any) -> None:
    notebook.cells[1].source = "**And now**"


def _unnamed(notebook: Any) -> None:
    del notebook.cells[4].metadata["nbparallel"]


def _shown(notebook: Any) -> None:
    next(cell for cell in notebook.cells if "solution" in tags(cell)).metadata["tags"] = ["solution"]


def _unchecked(notebook: Any) -> None:
    notebook.cells = [cell for cell in notebook.cells if "check" not in tags(cell)]


def _two_points(notebook: Any) -> None:
    notebook.cells[6].source = "## Key points\n\n* a\n* b"


def _not_stopped(notebook: Any) -> None:
    notebook.cells.pop()


def _unproved(notebook: Any) -> None:
    notebook.cells[5].source = "True"


def _given_away(notebook: Any) -> None:
    notebook.cells[2].source = "assert True"


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_run, "strip"),
        (_untitled, "You need"),
        (_long, "lines"),
        (_wide, "columns"),
        (_silent, "questions"),
        (_unnamed, "go together"),
        (_shown, "hidden"),
        (_unchecked, "four cells"),
        (_two_points, "key points"),
        (_not_stopped, "%parallel_stop"),
        (_unproved, "asserts nothing"),
        (_given_away, "gives the answer away"),
    ],
)
def test_each_broken_rule_is_found(spoil: Callable[[Any], None], word: str) -> None:
    """A notebook that keeps all rules has no problem; one that breaks a rule has one that names it."""
    notebook = lesson()
    assert problems(notebook) == []
    spoil(notebook)
    assert any(word in text for text in problems(notebook)), problems(notebook)


def test_every_rule_is_tried() -> None:
    """An empty notebook breaks every rule but the one on its format."""
    empty = nbformat.v4.new_notebook(metadata=copy.deepcopy(METADATA))
    broken = [rule.__name__.lstrip("_") for rule in RULES if list(rule(empty))]
    assert broken == ["head", "questions", "mistake", "exercises", "end", "claims"]


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
    assert sorted(rows) == [path.name for path in NOTEBOOKS]
    for path in NOTEBOOKS:
        head = nbformat.read(path, as_version=4).cells[0].source
        assert f"{rows[path.name]} minutes" in head, path.name


def test_the_lecturer_s_page_uses_the_field_s_words() -> None:
    """As the notebooks do."""
    assert not (found := offences(COURSE.read_text())), "\n".join(found)
