"""Where tests wait for a condition with a loop and a clock of their own, also in programs that they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.programs import program, texts

SUSPECT = re.compile(r"monotonic|perf_counter|sleep")
"""What a text holds that waits; a text without is not parsed."""
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
_ENDS = (ast.Break, ast.Raise, ast.Return)


def deadline_loops(text: str) -> list[int]:
    """Return the lines of loops that end with a condition or a deadline; of a program, its first line."""
    if not SUSPECT.search(text):
        return []
    tree = ast.parse(text)
    found = {loop.lineno for loop in _loops(tree)}
    for line, part in texts(tree):
        if SUSPECT.search(part) and (code := program(part)) is not None:
            found |= {line for _ in _loops(code)}
    return sorted(found)


def _loops(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            bounded = any(isinstance(s, ast.Assert | ast.If) and _calls(s.test, CLOCKS) for s in node.body)
            if _calls(node.test, CLOCKS) and (isinstance(node.test, ast.BoolOp) or _may_end(node)):
                yield node  # "while not there and monotonic() < deadline", or "…: if there: break"
            elif bounded and any(_calls(step, {"sleep"}) for step in node.body):
                yield node  # "while not there: assert monotonic() < deadline; sleep()"
        elif isinstance(node, ast.For):
            sleeps = any(isinstance(step, ast.Expr) and _calls(step, {"sleep"}) for step in node.body)
            if sleeps and _may_end(node):
                yield node  # "for _ in range(100): if there: break; sleep()"


def _may_end(loop: ast.While | ast.For) -> bool:
    """Tell whether a step of the loop ends it under a condition."""
    steps = [step for step in loop.body if isinstance(step, ast.If | ast.For)]
    return any(isinstance(end, _ENDS) for step in steps for end in ast.walk(step))


def _calls(tree: ast.AST, names: set[str]) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(function).rpartition(".")[2] in names for function in calls)
