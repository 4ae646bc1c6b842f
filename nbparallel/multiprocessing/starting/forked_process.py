"""Start method ``fork``: the child holds the arrays that it inherits."""

from __future__ import annotations

import functools
import importlib
from multiprocessing import popen_fork
from typing import Any

from nbparallel.multiprocessing.messages.exchange import prepare_fork
from nbparallel.multiprocessing.messages.main_globals import unchanging_globals
from nbparallel.multiprocessing.starting.late_interrupts import interrupts_blocked
from nbparallel.multiprocessing.starting.process_state import NEEDED, fork_in_progress


@functools.cache
def _load_needed() -> None:
    # Another thread may be about to load it for a message; a child that is forked in between could never.
    for name in NEEDED:
        importlib.import_module(name)


class ForkPopen(popen_fork.Popen):
    """A process that is forked from this one."""

    pid: Any = None  # known once it was forked

    def _launch(self, process_obj: Any) -> None:
        _load_needed()
        inherited = unchanging_globals()
        fork = prepare_fork(daemon=process_obj.daemon or process_obj.ends_with_parent)
        # the child takes it up in `ValueProcess._bootstrap`, before anything else
        fork_in_progress.fork = None if fork is None else (fork, inherited)
        try:
            with interrupts_blocked(late=process_obj.interrupts_late):
                super()._launch(process_obj)  # type: ignore[misc]
        finally:
            vars(fork_in_progress).pop("fork", None)
            if fork is not None and self.pid is not None:
                fork.parent(self.pid)
            elif fork is not None:
                fork.cancel()
