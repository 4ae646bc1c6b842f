"""Process context: command lines, environment, and the attributes that a started process inherits.

A rank receives the notebook's environment, directory and search path at its start, and again when they
change.  But what an interpreter or a module read from them earlier, and what only the system passes from
parent to child, stays as it was when the supervisor was started.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    ``-I -S -E``: no user site, no site-packages, no ``PYTHON*``: nothing of the user's is loaded.
    """
    return [sys.executable, "-I", "-S", "-E", "-c", _SUPERVISOR, PACKAGE_PARENT]


def template_argv() -> list[str]:
    """Return the template's command line, with the notebook's search path but not its directory."""
    return [sys.executable, "-P", "-c", _ENGINE.format("template", "main"), _path()]


def engine_argv() -> list[str]:
    """Return the command line of a rank that is not forked."""
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
    """Attributes of this process at one moment; processes started with equal ones are equal."""

    commands: tuple[tuple[str, ...], ...]
    """Interpreter and search path."""
    environment: dict[str, str]
    """All of it: a library can read any variable when it is imported."""
    handed_down: tuple[object, ...]
    """Processors, priority, limits, creation mask, user and group."""
    package: tuple[int, ...]
    """Inode, time and size of this package's file: another version may have been installed."""


def process_attributes() -> ProcessAttributes:
    """Return the attributes of this process now (0.05 ms)."""
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
        return ()  # it was removed: the next start reports it
    return found.st_ino, found.st_mtime_ns, found.st_size


def _creation_mask() -> str:
    """Return the umask from ``/proc``: `os.umask` can only read it by setting it."""
    try:
        with open("/proc/self/status") as file:
            return next((line for line in file if line.startswith("Umask")), "")
    except OSError:
        return ""


def _shell() -> Any:
    module = sys.modules.get("IPython")
    get_ipython = getattr(module, "get_ipython", None)  # another thread may be half-way through the import
    return None if get_ipython is None else get_ipython()


def notebook_colors() -> str:
    """Return the notebook's colour scheme, so that tracebacks look alike."""
    return str(getattr(_shell(), "colors", "nocolor"))


def has_magics() -> bool:
    """Return whether `%share` can be written where the session is."""
    shell = _shell()
    return shell is not None and shell.find_line_magic("share") is not None
