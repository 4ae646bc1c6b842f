"""How the supervisor, the template and a fresh rank are started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
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
