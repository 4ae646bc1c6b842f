"""Write copies of notebooks for students: everything but the solutions of the exercises.

Usage: ``python notebooks/student.py FOLDER [NOTEBOOK …]``, by default of all notebooks beside this file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent


FOLDED = "A folded cell (•••)"
"""Begins the paragraph about solutions."""


def student_copy(notebook: Any) -> Any:
    """Return a new notebook without the cells that are tagged `solution`, and without a word about them."""
    copy = nbformat.from_dict(notebook)
    copy.cells = [cell for cell in copy.cells if "solution" not in cell.metadata.get("tags", [])]
    for cell in copy.cells:
        parts = cell.source.split("\n\n")
        cell.source = "\n\n".join(part for part in parts if not part.startswith(FOLDED))
    return copy


def main() -> int:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the copies go; a notebook of that name is replaced")
    parser.add_argument("notebooks", type=Path, nargs="*", metavar="NOTEBOOK")
    options = parser.parse_args()
    if options.folder.resolve() == HERE:
        parser.error(f"{HERE} holds the notebooks themselves; name another folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in options.notebooks or sorted(HERE.glob("*.ipynb")):
        nbformat.write(student_copy(nbformat.read(path, as_version=4)), options.folder / path.name)
        print(options.folder / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
