"""The texts of a test's source that may be programs: cells, scripts, and parts of them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and value of each text that is no docstring; what is put into one stands there as 0."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)}
            yield (
                node.lineno,
                "".join(str(p.value) if isinstance(p, ast.Constant) else "0" for p in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def program(text: str) -> ast.Module | None:
    """Return a text as code; None: it is none, or only a part of some."""
    try:
        return ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None
