"""The site's navigation: a page of links is a section, and its links are the pages of that section.

So the order of pages is written once, as a list that GitHub shows as well.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

FRONT = "docs/index"
SECTIONS = {
    "docs/get-started/index": "Get started",
    "docs/course/index": "Course",
    "docs/how-to/index": "Guides",
    "docs/reference/index": "Reference",
    "docs/explanation/index": "How it works",
    "docs/project/index": "Project",
}
"""The pages of links, with the word that names each in the head of every page."""
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r"^[*-] \[[^\]]*\]\(([^)#:\s]+\.md)\)", re.MULTILINE)
_FILES = re.compile(r"^<!-- every file of (\S+) -->$", re.MULTILINE)
_LISTED = "```{{toctree}}\n:maxdepth: 1\n\n{}\n```"
_HIDDEN = "\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{}\n```\n"


def pages_of(source: str, page: str) -> list[str]:
    """Return the pages that a section lists, as paths from the repository's root.

    Parameters
    ----------
    source : str
        Its Markdown.  Each item of a list that begins with a link is a page.
    page : str
        Where the section is, as ``docs/how-to/index``.
    """
    here = PurePosixPath(page).parent
    return [normpath(here / match[1]) for match in _ITEM.finditer(_FENCE.sub("", source))]


def _entry(path: Path, root: Path) -> str:
    """Return a file's line in a list of pages; a notebook's begins with the number that texts call it by."""
    page = "/" + path.relative_to(root).with_suffix("").as_posix()
    if path.suffix != ".ipynb":
        return page
    heading = json.loads(path.read_text())["cells"][0]["source"][0].strip("# \n")
    return f"{path.name.partition('-')[0]} {heading} <{page}>"


def with_files(source: str, page: str, root: Path) -> str:
    """Replace ``<!-- every file of PATTERN -->`` by a list of the files' titles, if there are any."""

    def replace(comment: re.Match[str]) -> str:
        paths = sorted(root.glob(normpath(PurePosixPath(page).parent / comment[1])))
        return _LISTED.format("\n".join(_entry(path, root) for path in paths)) if paths else ""

    return _FILES.sub(replace, source)


def _read(app: Any, page: str, source: list[str]) -> None:
    entries = []
    if page == FRONT:
        entries = [f"{title} </{section}>" for section, title in SECTIONS.items()]
    elif page in SECTIONS:
        entries = [f"/{path}" for path in pages_of(source[0], page)]
    source[0] = with_files(source[0], page, Path(app.srcdir))
    if entries:
        source[0] += _HIDDEN.format("\n".join(entries))


def setup(app: Any) -> dict[str, bool]:
    """Add the lists of pages when a section is read."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
