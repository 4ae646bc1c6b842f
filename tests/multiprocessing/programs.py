"""Runs a program as a user's script, with each start method, and looks at what it leaves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
import os, sys, time, signal
import numpy as np
import nbparallel as nbp
import nbparallel.multiprocessing as mp
from nbparallel.errors import *
ctx = mp.get_context({method!r})
"""


def run_program(body: str, folder: Path, method: str = "fork", *, limit: float = 60) -> str:
    """Run a script whose first lines are `HEAD`, without a guard, and return what it printed.

    It must end by itself with exit code 0 and nothing on stderr.
    """
    script = folder / "script.py"
    script.write_text(HEAD.format(method=method) + textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=limit, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout
