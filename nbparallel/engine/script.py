"""Running a script on a rank, as ``python script.py`` would."""

from __future__ import annotations

import sys
from typing import Any

from nbparallel.wire.messages import ScriptTask


def run(task: ScriptTask, namespace: dict[str, Any]) -> None:
    """Run the script in the rank's ``__main__``; leaving by ``sys.exit(0)`` is success.

    The names that are predefined in a cell are there as well, until the script assigns its own.
    """
    sys.argv[:] = [task.path, *task.arguments]
    namespace["__file__"] = task.path
    namespace["__package__"] = task.package
    code = compile(task.source, task.path, "exec", dont_inherit=True)
    try:
        exec(code, namespace)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
