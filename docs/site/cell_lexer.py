"""Colours of cells: after a line with a magic the code is Python, as it is on the ranks."""

from __future__ import annotations

from typing import Any

from ipython_pygments_lexers import IPython3Lexer
from pygments.lexer import bygroups, inherit
from pygments.token import Keyword, Operator, Text


class CellLexer(IPython3Lexer):  # type: ignore[misc]  # it has no types
    """IPython, with the body of a cell for ranks coloured as Python."""

    name, aliases = "Cell for ranks", []
    tokens = {  # noqa: RUF012  # as Pygments has it
        "root": [
            (r"^(%%)(parallel|rank)\b([^\n]*\n?)", bygroups(Operator, Keyword, Text)),
            (r"^(\s*)(%)(parallel|rank)\b", bygroups(Text, Operator, Keyword)),
            inherit,
        ]
    }


def setup(app: Any) -> dict[str, bool]:
    """Take the place of IPython's lexer, which shows such a body as plain text."""
    for name in ("ipython3", "ipython"):
        app.add_lexer(name, CellLexer)
    return {"parallel_read_safe": True}
