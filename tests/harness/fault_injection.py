"""Named points at which a test can make a rank fail: comments in the library, ``# fault: POINT``.

In a process that `arm` was called in they are calls: the modules that have them are compiled once more, with
a call in each comment's line, and their functions get the new code.  Behind a point a comment may have a
condition; one that names no point is a statement for such a process alone.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

POINTS = ("enter", "wrote_header", "half_payload", "wrote_flag", "waiting", "leave")
"""Points in an operation; tests iterate over all of them, so that none can be forgotten."""
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT, "raise": None}
"""What can be done there: a signal, or `FaultInjected`."""
MODULES = (
    "collectives.direct", "collectives.in_place", "collectives.reduce",
    "point_to_point.endpoints", "point_to_point.streaming", "runtime.rank_context", "runtime.waiting",
    "slots.slot_protocol",
)  # fmt: skip
"""Of `nbparallel.distributed`: those with points."""
_MARK = re.compile(r"^( *)# fault: (.+)$", re.MULTILINE)
_NAME = "_fault"
Hit = Callable[[str], None]
Codes = list[tuple[tuple[str, int], CodeType]]
"""Of functions, by name and first line."""


class FaultInjected(Exception):  # noqa: N818 - it is no error of the product
    """What the action ``raise`` raises."""


def arm(plan: str | None, rank: int) -> None:
    """Have this process, a rank, fail by a plan: ``point:rank:nth:action``; None: it does not.

    At the `nth` time (from 1) that the rank passes the point it does the action.
    """
    if plan is None:
        return
    point, victim, nth, action = plan.split(":")
    number, left = ACTIONS[action], int(nth)
    assert point in POINTS, point

    def hit(passed: str) -> None:
        nonlocal left
        if passed == point and rank == int(victim):
            left -= 1
            if left:
                return
            if number is None:
                raise FaultInjected(f"injected at {point} on rank {rank}")
            os.kill(os.getpid(), number)

    call_at_points(hit)


def call_at_points(hit: Hit) -> None:
    """Have `hit` called with the name of each point that this process passes from now on."""
    for module, found in marked_modules():
        codes = dict(found)
        for function in _functions(vars(module), module.__name__):
            key = function.__code__.co_name, function.__code__.co_firstlineno
            if key in codes:
                function.__code__ = codes.pop(key)
        assert not codes, f"functions with points that were not found in {module}: {codes}"
        vars(module)[_NAME] = hit


@functools.cache
def marked_modules() -> list[tuple[Any, Codes]]:
    """Return each module with points and their code; called before forks, it is compiled for all of them."""
    modules: list[Any] = [importlib.import_module(f"nbparallel.distributed.{name}") for name in MODULES]
    return [(module, _marked(module.__file__)) for module in modules]


def _marked(path: str) -> Codes:
    """Return name, first line and new code of the functions and methods of a module that have points."""
    text = Path(path).read_text()
    lines = {text.count("\n", 0, mark.start(2)) + 1 for mark in _MARK.finditer(text)}

    def has_point(code: CodeType) -> bool:
        return any(line in lines for _, _, line in code.co_lines()) or any(map(has_point, _parts(code)))

    found: Codes = []
    todo = [compile(_MARK.sub(_as_code, text), path, "exec")]
    while todo:
        for part in _parts(todo.pop()):
            if "__qualname__" in part.co_names:  # a class
                todo.append(part)
            elif has_point(part):
                found.append(((part.co_name, part.co_firstlineno), part))
    return found


def _parts(code: CodeType) -> list[CodeType]:
    return [part for part in code.co_consts if isinstance(part, CodeType)]


def _as_code(mark: re.Match[str]) -> str:
    indent, text = mark.groups()
    point, _, condition = text.partition(" if ")
    if point not in POINTS:
        return f"{indent}{text}"
    return f"{indent}{f'if {condition}: ' * bool(condition)}{_NAME}({point!r})"


def _functions(names: dict[str, Any], module: str) -> Iterator[FunctionType]:
    for value in list(names.values()):
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(dict(vars(value)), module)
