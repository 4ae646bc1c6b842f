"""Circumstances: what a process takes over from the one that starts it, and cannot be told later.

A rank gets the notebook's environment, directory and search path when it starts, and all three again when
they change.  But what has acted on them before, while the interpreter started or a module was imported, and
what only the system hands down from process to process, is as it was when the first of them was started.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import nbparallel

PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
"""The directory that holds the package: a checkout or site-packages."""

_SUPERVISOR = (
    "import sys; sys.path.append(sys.argv[1]); from nbparallel.supervisor.main import main; "
    "main(*map(int, sys.argv[2:]))"
)
_ENGINE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from nbparallel.engine.{} import {} as main; "
    "main(*map(int, sys.argv[2:]))"
)


def supervisor_argv() -> list[str]:
    """Return the supervisor's command line without its descriptors.

    ``-I -S -E``: no user site, no site-packages, no ``PYTHON*``: nothing of the user's can reach it.
    """
    return [sys.executable, "-I", "-S", "-E", "-c", _SUPERVISOR, PACKAGE_PARENT]


def template_argv() -> list[str]:
    """Return the template's command line; it gets the notebook's path, but not its directory."""
    return [sys.executable, "-P", "-c", _ENGINE.format("template", "main"), _path()]


def engine_argv() -> list[str]:
    """Return the command line of a rank that is started afresh."""
    return [sys.executable, "-P", "-c", _ENGINE.format("main", "spawned"), _path()]


def _path() -> str:
    path = [entry for entry in sys.path if entry and os.path.isabs(entry)]
    return json.dumps(path if PACKAGE_PARENT in path else [*path, PACKAGE_PARENT])


BLAS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def environment(session: str, hash_seed: int) -> dict[str, str]:
    """Return the environment of the supervisor and, through it, of the template.

    BLAS has one thread while the template forks; a rank sets its own number afterwards and gets the
    notebook's environment back.
    """
    values = dict(os.environ)
    values.update(dict.fromkeys(BLAS_VARIABLES, "1"))
    values["NBP_SESSION"] = session
    values.pop("NBP_CLIENT", None)  # of a session in which this process may run
    values.setdefault("PYTHONHASHSEED", str(hash_seed))
    return values


_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


@dataclass(frozen=True)
class ProcessAttributes:
    """As they are in this process at one moment; equal ones start equal processes."""

    commands: tuple[tuple[str, ...], ...]
    """Interpreter and search path."""
    environment: dict[str, str]
    """All of it: a library may look at any variable when it is imported."""
    handed_down: tuple[object, ...]
    """Processors, priority, limits, creation mask, user and group."""
    package: tuple[int, ...]
    """Which files are installed as this package, if any are: another version may have come."""


def process_attributes() -> ProcessAttributes:
    """Return those of this process now (0.05 ms)."""
    return ProcessAttributes(
        (tuple(template_argv()), tuple(engine_argv())),
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
