"""What every teaching notebook has: `problems` reads it from the file, without running anything.

Marks that the rules look for
-----------------------------
* The first cell has a title and the lines ``**You will do**``, ``**You will learn**``, ``**You need**``.
* A question is a text cell with ``**What will happen?**``, right before the code cell that answers it.
  That cell asserts nothing, or a student reads the answer below the question; a later cell asserts it.
* A planned mistake is a code cell with the tag ``raises-exception`` and ``nbparallel.raises`` in its
  metadata: the class that the cell raises, or that a rank raises in it.
* An exercise is three cells in a row, with the tags ``exercise`` (text that begins with number and title),
  ``start`` (code that runs as it is) and ``check`` (asserts).  A notebook of the same name in ``solutions/``
  has a cell for each exercise.
* The answer to a question stands below the cells that show it: nothing is folded.
* Every ``assert`` says what is wrong.
* The key points are a text cell that begins with ``## Key points``: three of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import nbformat

MAX_CELLS, MAX_LINES, MAX_COLUMNS = 20, 12, 76
HEAD = ("**You will do**", "**You will learn**", "**You need**")
QUESTION = "**What will happen?**"
EXERCISE = ("exercise", "start", "check")
CHECK = ["check", "raises-exception", "remove-output"]
"""Run All goes on behind a check that fails; the site does not show that it does."""
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def tags(cell: Any) -> list[str]:
    """Return the tags of a cell."""
    return list(cell.metadata.get("tags", []))


def problems(notebook: Any) -> list[str]:
    """Return which rules a notebook breaks, in words."""
    return [text for rule in RULES for text in rule(notebook)]


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _lesson(notebook: Any) -> list[Any]:
    """Return the code cells outside the exercises."""
    return [cell for cell in _code(notebook) if not set(tags(cell)) & set(EXERCISE)]


def _format(notebook: Any) -> Iterator[str]:
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error}"
    if notebook.metadata != METADATA:
        yield f"metadata of the notebook are not {METADATA}"
    for cell in _code(notebook):
        if cell.outputs or cell.execution_count is not None:
            yield f"cell {cell.get('id')} has outputs or a count: strip them"
        if extra := set(cell.metadata) - {"tags", "jupyter", "nbparallel"}:
            yield f"cell {cell.get('id')} has metadata {sorted(extra)}: strip them"


def _head(notebook: Any) -> Iterator[str]:
    first = notebook.cells[0].source if notebook.cells else ""
    if not first.startswith("# "):
        yield "the first cell does not begin with a title"
    yield from (f"the first cell lacks {part}" for part in HEAD if part not in first)


def _sizes(notebook: Any) -> Iterator[str]:
    if (count := len(_lesson(notebook))) > MAX_CELLS:
        yield f"{count} code cells outside the exercises, more than {MAX_CELLS}"
    for cell in _code(notebook):
        lines = cell.source.splitlines()
        if len(lines) > MAX_LINES:
            yield f"a cell of {len(lines)} lines, more than {MAX_LINES}: {lines[0]!r}"
        yield from (f"more than {MAX_COLUMNS} columns: {line!r}" for line in lines if len(line) > MAX_COLUMNS)


def _questions(notebook: Any) -> Iterator[str]:
    asked = [(cell, after) for cell, after in pairwise(notebook.cells) if QUESTION in cell.source]
    if len(asked) < 2:
        yield f"{len(asked)} questions {QUESTION}, less than 2"
    if any(after.cell_type != "code" for _, after in asked):
        yield f"after {QUESTION} comes no code cell that answers it"
    for before, after in asked:
        if "<details>" in before.source:
            yield f"the answer stands above the cell that shows it: {before.source!r}"
        if after.cell_type == "code" and re.search(r"^\s*assert\b", after.source, re.MULTILINE):
            yield f"a question's cell gives the answer away: assert it in a later one: {after.source!r}"


def _mistake(notebook: Any) -> Iterator[str]:
    planned = [cell for cell in _lesson(notebook) if "raises-exception" in tags(cell)]
    if not planned:
        yield "no planned mistake (tag raises-exception)"
    for cell in _code(notebook):
        if "check" in tags(cell):
            continue  # fails until the exercise is done; what comes after it runs all the same
        named = bool(re.fullmatch(r"\w+", cell.metadata.get("nbparallel", {}).get("raises", "")))
        if named != ("raises-exception" in tags(cell)):
            yield f"tag raises-exception and metadata nbparallel.raises go together: {cell.source!r}"


def _exercises(notebook: Any) -> Iterator[str]:
    parts = [(set(tags(cell)) & set(EXERCISE), cell) for cell in notebook.cells]
    begins = [index for index, (part, _) in enumerate(parts) if part == {"exercise"}]
    if not 2 <= len(begins) <= 3:
        yield f"{len(begins)} exercises, not 2 or 3"
    for number, index in enumerate(begins, 1):
        if [part for part, _ in parts[index : index + 3]] != [{name} for name in EXERCISE]:
            yield f"exercise {number} is not three cells with the tags {EXERCISE}"
        if not re.search(rf"^\*\*{number}\. ", parts[index][1].source, re.MULTILINE):
            yield f"exercise {number} does not begin with its number and title"
    if sum(bool(part) for part, _ in parts) != 3 * len(begins):
        yield "a part of an exercise stands alone"
    for part, cell in parts:
        if part and (cell.cell_type == "markdown") != (part == {"exercise"}):
            yield f"the text of an exercise is text, the rest code: {cell.source!r}"
        if part == {"check"} and "assert" not in cell.source:
            yield f"a check asserts nothing: {cell.source!r}"
        if part == {"check"} and tags(cell) != CHECK:
            yield f"a check has other tags than {CHECK}: {cell.source!r}"


def _messages(notebook: Any) -> Iterator[str]:
    for cell in _code(notebook):
        for node in ast.walk(ast.parse(_without_magics(cell.source))):
            if isinstance(node, ast.Assert) and node.msg is None:
                yield f"an assert does not say what is wrong: {ast.unparse(node)!r}"


def _without_magics(source: str) -> str:
    """Return a cell's Python, with what a `%parallel` in one line asserts."""
    lines = []
    for line in source.splitlines():
        code = re.sub(r"^(\s*)%parallel (?=assert)", r"\1", line)
        lines.append(re.sub(r"^(\s*)(?:\w+ = )?%.*", r"\1pass", code))
    return "\n".join(lines)


def _end(notebook: Any) -> Iterator[str]:
    sources = [cell.source for cell in notebook.cells]
    found = [index for index, source in enumerate(sources) if source.startswith("## Key points")]
    if len(found) != 1 or (points := len(re.findall(r"^\* ", sources[found[0]], re.MULTILINE))) != 3:
        yield f"key points: one cell '## Key points' with three '* ', not {points if found else 'none'}"
    elif any(cell in _lesson(notebook)[:-1] for cell in notebook.cells[found[0] :]):
        yield "the key points do not stand at the end"
    if not _code(notebook) or "%parallel_stop" not in _code(notebook)[-1].source:
        yield "the last code cell is not %parallel_stop"


def _claims(notebook: Any) -> Iterator[str]:
    if not any("assert" in cell.source for cell in _lesson(notebook)):
        yield "the lesson asserts nothing that it claims"


RULES = (_format, _head, _sizes, _questions, _mistake, _exercises, _messages, _end, _claims)
