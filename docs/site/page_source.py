"""Pages as the site shows them: fences, links and names, where GitHub and the site differ.

What tests read in a fence (``exec="false" reason="…"``) is left out, and a block with a magic is coloured as
IPython.  A link to a file of the repository that is no page of the site becomes its text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

import nbparallel.errors

_FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ANY_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_MAGIC = re.compile(r"^\s*[%!]|= *%|^.*\w\?$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
ERRORS = "docs/reference/errors"
INTERNAL = {
    "Work.begin",
    "Work.drop",
    "Work.fail",
    "Work.finish",
    "Group.word",
    "Session.broker",
    "Session.complete",
    "Session.perform",
    "Session.share_names",
}
"""Public members that programs do not need: the reference lists them with what they are for."""


def plain_fences(text: str) -> str:
    """Return Markdown whose Python fences name a language and nothing else."""

    def replace(fence: re.Match[str]) -> str:
        return f"```{'ipython3' if _MAGIC.search(fence[2]) else 'python'}\n{fence[2]}```"

    return _FENCE.sub(replace, text)


def links_on_site(text: str, page: str, pages: set[str], root: Path) -> str:
    """Return Markdown in which only pages are linked; a folder's link leads to its page.

    Parameters
    ----------
    text, page : str
        Markdown and the page that it is, as ``docs/index``.
    pages : set of str
        All pages of the site.
    root : Path
        The repository; a link to what is not there stays, and Sphinx reports it.
    """

    def replace(link: re.Match[str]) -> str:
        target = normpath(PurePosixPath(page).parent / link[2])
        for name in ("index", "README"):
            if f"{target}/{name}" in pages:
                return f"[{link[1]}]({link[2].rstrip('/')}/{name}.md)"
        if target.rpartition(".")[0] in pages or not (root / target).exists():
            return link[0]
        return link[1]

    return "".join(
        part if part.startswith("```") else _LINK.sub(replace, part) for part in _ANY_FENCE.split(text)
    )


def _read(app: Any, page: str, source: list[str]) -> None:
    if app.env.doc2path(page).suffix == ".md":
        source[0] = links_on_site(plain_fences(source[0]), page, app.env.found_docs, Path(app.srcdir))


def _resolve(app: Any, _env: Any, node: Any, content: Any) -> Any:
    """Link an error to its section; show other names that have no page, such as numpy's, as code."""
    from sphinx.util.nodes import make_refnode  # tests of this module run without Sphinx

    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    if isinstance(getattr(nbparallel.errors, name, None), type):
        return make_refnode(app.builder, node["refdoc"], ERRORS, name.lower(), content)
    return content if node["reftype"] == "obj" else None


def _skip(_app: Any, _kind: str, _name: str, member: Any, skip: bool, _options: Any) -> bool | None:
    """Leave internal members out of the pages of their classes."""
    function = getattr(member, "fget", None) or member
    return True if getattr(function, "__qualname__", "") in INTERNAL else None


def setup(app: Any) -> dict[str, bool]:
    """Change pages when they are read, and names when pages are written."""
    app.connect("source-read", _read)
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True}
