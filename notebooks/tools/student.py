"""Write copies of lessons that are complete without the rest of a clone: no link of theirs leads nowhere.

Usage: ``python notebooks/tools/student.py FOLDER [NOTEBOOK …]``, by default of all lessons.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

LESSONS = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)#]*)[^)]*\)")


def student_copy(notebook: Any, names: set[str]) -> Any:
    """Return a new notebook in which links to anything but the notebooks called `names` are plain text."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(lambda link: link[0] if link[2] in names else link[1], cell.source)
            cell.source = cell.source.replace(
                "For each there is a solution in a notebook of its own.\n\n", ""
            )
    return copy


def main() -> int:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the copies go; a notebook of that name is replaced")
    parser.add_argument("notebooks", type=Path, nargs="*", metavar="NOTEBOOK")
    options = parser.parse_args()
    if options.folder.resolve() == LESSONS:
        parser.error(f"{LESSONS} holds the lessons themselves; name another folder")
    options.folder.mkdir(parents=True, exist_ok=True)
    paths = options.notebooks or sorted(LESSONS.glob("*.ipynb"))
    for path in paths:
        copy = student_copy(nbformat.read(path, as_version=4), {other.name for other in paths})
        nbformat.write(copy, options.folder / path.name)
        print(options.folder / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
