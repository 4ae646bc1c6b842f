"""Start method ``fork``: the child holds the arrays that it inherits."""

from __future__ import annotations

import contextlib
import functools
import importlib
from multiprocessing import popen_fork
from typing import Any

from nbparallel.errors import ForkedRankError
from nbparallel.multiprocessing.messages.parcels import mark_forked, unchanging_globals
from nbparallel.multiprocessing.starting.interrupts import interrupts_blocked
from nbparallel.multiprocessing.starting.process_state import NEEDED, default_context

_nothing = contextlib.nullcontext()


@functools.cache
def _household() -> Any:
    # Another thread may be about to load it for a message; a child that is forked in between could never.
    for name in NEEDED:
        importlib.import_module(name)
    return importlib.import_module("nbparallel.multiprocessing.household")


class _Child:
    """What the library's launch calls in the child, which takes its part before it does the work."""

    def __init__(self, process: Any, fork: Any) -> None:
        self._process, self._fork, self._inherited = process, fork, unchanging_globals()
        self._force_start_method = default_context().force_start_method

    def _bootstrap(self, parent_sentinel: int) -> int:
        if self._fork is not None:
            self._fork.child()
            mark_forked(self._inherited)
        if self._process._start_method is not None:
            self._force_start_method(self._process._start_method)
        code: int = self._process._bootstrap(parent_sentinel)
        return code


class ForkPopen(popen_fork.Popen):
    """A process that is forked from this one."""

    pid: Any = None  # known once it was forked

    def _launch(self, process_obj: Any) -> None:
        try:
            fork = _household().prepare_fork(daemon=process_obj.daemon or process_obj.ends_with_parent)
        except ForkedRankError:
            fork = None  # this process takes no part
        try:
            with interrupts_blocked() if process_obj.defers_sigint else _nothing:
                super()._launch(_Child(process_obj, fork))  # type: ignore[misc]  # typeshed has it in Popen
        finally:
            if fork is not None:
                fork.parent()
