"""Launches of a measuring program, each in an interpreter of its own: no two processes are alike."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

LIMIT_SECONDS = 300.0


def launch(module: str, *arguments: str) -> dict[str, Any]:
    """Run the module's ``main`` in a new interpreter and return the JSON object that its last line is.

    It is imported, and not run as ``__main__``: the library's fresh processes would run that again.

    Raises
    ------
    RuntimeError
        It failed; with what it wrote.
    """
    program = f"from {module} import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians_of_launches(module: str, launches: int, *arguments: str) -> dict[str, float]:
    """Return for each name that the launches measured the median of their figures, in seconds."""
    found = [launch(module, *arguments) for _ in range(launches)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def in_turns(names: Sequence[str], turn: int) -> Sequence[str]:
    """Return who is measured in which order: every other turn backwards, as a machine's speed drifts."""
    return names[:: (-1) ** turn]
