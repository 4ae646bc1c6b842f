"""Start method ``fork``: the child holds the arrays that it inherits."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from multiprocessing import popen_fork, util
from typing import Any

from nbparallel.errors import ForkedRankError
from nbparallel.multiprocessing.messages.main_globals import mark_forked, unchanging_globals
from nbparallel.multiprocessing.starting.current_context import default_context
from nbparallel.multiprocessing.starting.late_interrupts import interrupts_blocked
from nbparallel.multiprocessing.starting.process_state import NEEDED

_nothing = contextlib.nullcontext()


@functools.cache
def _household() -> Any:
    # Another thread may be about to load it for a message; a child that is forked in between could never.
    for name in NEEDED:
        importlib.import_module(name)
    return importlib.import_module("nbparallel.multiprocessing.household")


class ForkPopen(popen_fork.Popen):
    """A process that is forked from this one."""

    pid: Any = None  # known once it was forked

    def _launch(self, process_obj: Any) -> None:  # the library's, with what the child is given
        inherited = unchanging_globals()
        force_start_method = default_context().force_start_method
        try:
            fork = _household().prepare_fork(daemon=process_obj.daemon or process_obj.ends_with_parent)
        except ForkedRankError:
            fork = None  # this process takes no part
        try:
            with interrupts_blocked() if process_obj.interrupts_late else _nothing:
                parent_r, child_w = os.pipe()
                child_r, parent_w = os.pipe()
                self.pid = os.fork()
                if self.pid == 0:
                    code = 1
                    try:
                        os.close(parent_r)
                        os.close(parent_w)
                        if fork is not None:
                            fork.child()
                            mark_forked(inherited)
                        if process_obj._start_method is not None:
                            force_start_method(process_obj._start_method)
                        code = process_obj._bootstrap(child_r)
                    finally:
                        os._exit(code)
                os.close(child_w)
                os.close(child_r)
                self.finalizer = util.Finalize(self, util.close_fds, (parent_r, parent_w))  # type: ignore[attr-defined]
                self.sentinel = parent_r
        finally:
            if fork is not None and self.pid is not None:
                fork.parent(self.pid)
            elif fork is not None:
                fork.cancel()
