"""Circumstances: what a process takes over from the one that starts it, and cannot be told later.

A rank gets the notebook's environment, directory and search path when it starts, and all three again when
they change.  But what has acted on them before, while the interpreter started or a module was imported, and
what only the system hands down from process to process, is as it was when the first of them was started.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import nbparallel
from nbparallel.session import boot

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class Circumstances:
    """As they are in this process at one moment; equal ones start equal processes."""

    commands: tuple[tuple[str, ...], ...]
    """Interpreter and search path."""
    environment: dict[str, str]
    """All of it: a library may look at any variable when it is imported."""
    handed_down: tuple[object, ...]
    """Processors, priority, limits, creation mask, user and group."""
    package: tuple[int, ...]
    """Which files are installed as this package, if any are: another version may have come."""


def circumstances() -> Circumstances:
    """Return those of this process now (0.05 ms)."""
    return Circumstances(
        (tuple(boot.template_argv()), tuple(boot.engine_argv())),
        dict(os.environ),
        (
            os.sched_getaffinity(0),
            os.getpriority(os.PRIO_PROCESS, 0),
            tuple(map(resource.getrlimit, _LIMITS)),
            _creation_mask(),
            os.getresuid(),
            os.getresgid(),
        ),
        _package(),
    )


def _package() -> tuple[int, ...]:
    try:
        found = os.stat(nbparallel.__file__)
    except OSError:
        return ()  # it was taken away: whoever starts something of it is told
    return found.st_ino, found.st_mtime_ns, found.st_size


def _creation_mask() -> str:
    """Return the umask as ``/proc`` says it: `os.umask` would have to set it to see it."""
    try:
        with open("/proc/self/status") as file:
            return next((line for line in file if line.startswith("Umask")), "")
    except OSError:
        return ""
