"""The sweep when the extension is loaded: what can be removed in no time."""

from __future__ import annotations

import errno
import os
import time

from nbparallel.wire.owners import usual_places
from nbparallel.wire.segments import NAME_PREFIX

BUDGET_SECONDS = 0.03
"""What it does not get done in this time is left to the supervisor, which the first cell starts."""
AT_MOST = 64 << 20
"""Freeing so many bytes takes some milliseconds; larger names are left to the supervisor as well."""


def sweep_at_load() -> str:
    """Remove what dead sessions left; return the line that says so, empty if there is nothing to say."""
    if not any(map(_has_names, usual_places())):
        return ""
    from nbparallel.supervisor import sweep

    deadline, found = time.monotonic() + BUDGET_SECONDS, []
    for name in sweep.steps(remove=_remove_small):
        found.append(name)
        if time.monotonic() > deadline:
            break
    return sweep.report_of(found).sentence


def _remove_small(path: str, nbytes: int) -> None:
    if nbytes > AT_MOST:
        raise BlockingIOError(errno.EAGAIN, "it is large, the next session's supervisor removes it")
    os.unlink(path)


def _has_names(directory: str) -> bool:
    try:
        return any(name.startswith(NAME_PREFIX) for name in os.listdir(directory))
    except OSError:
        return False
