"""Versions: what the notebook's process and a rank must have in common, since they exchange pickles.

A package that is installed while a notebook runs is found by processes that start later; the notebook
itself goes on with what it has imported.
"""

from __future__ import annotations

import json
import platform
import sys

from nbparallel.errors import ProtocolError

MODULES = ("nbparallel", "numpy")
"""Compared if both sides have imported them."""


def versions() -> dict[str, str]:
    """Return what this process runs."""
    found = {"Python": platform.python_version()}
    for name in MODULES:
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    return found


def pack_versions() -> bytes:
    """Return the payload of ``RANK_READY``."""
    return json.dumps(versions()).encode()


def difference(payload: bytes) -> str:
    """Compare a rank's versions with this process's: ``numpy 2.3 (the notebook has 2.2)``, empty if equal.

    Raises
    ------
    ProtocolError
        The payload holds no versions.
    """
    try:
        theirs = json.loads(payload)
        mine = versions()
        differing = [name for name in mine if name in theirs and theirs[name] != mine[name]]
        return ", ".join(f"{name} {theirs[name]} (the notebook has {mine[name]})" for name in differing)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a RANK_READY frame without versions: {payload[:20]!r}") from error
