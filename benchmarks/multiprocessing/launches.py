"""Launches of a measuring program, each in an interpreter of its own: no two processes are alike.

Within a launch all that is measured takes turns; `beside` and `print_rows` make a table of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.report import Figure, human_seconds, not_installed

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
    """Return what is measured in which order: every other turn backwards, as a machine's speed drifts."""
    return names[:: (-1) ** turn]


def medians_of_turns(
    calls: Mapping[str, Callable[[int], float]], rounds: int, *, uncounted: int = 1
) -> dict[str, float]:
    """Return the median of the seconds that each call returned; its argument is the number of the turn.

    The first `uncounted` turns, in which calls check their results as well, come before the `rounds`.
    """
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(uncounted + rounds):
        for name in in_turns(tuple(calls), turn):
            seconds = calls[name](turn)
            if turn >= uncounted:
                took[name].append(seconds)
    return {name: statistics.median(times) for name, times in took.items()}


def beside(
    what: str,
    found: Mapping[str, float],
    ours: str,
    peer: tuple[str, str],
    aim: str = "–",
    least: float | None = None,
) -> Figure:
    """Return a row of what was measured.

    Parameters
    ----------
    ours : str
        Key of our seconds in `found`.
    peer : tuple of str
        Key of the peer's, and its name.
    least : float, optional
        How many times as long as ours the peer should take at least.
    """
    key, name = peer
    value = human_seconds(found[ours])
    if key not in found:
        return Figure(what, value, not_installed(name), aim=aim)
    ratio = found[key] / found[ours]
    met = None if least is None else ratio >= least
    return Figure(what, value, f"{name}: {human_seconds(found[key])}", ratio, aim, met)


def print_rows(rows: Iterable[Figure]) -> None:
    """Print rows as lines of text."""
    for row in rows:
        ratio = f"{row.ratio:.2f} ×" if row.ratio else ""
        print(f"{row.what:52}{row.value:>12}  {row.peer:45} {ratio:10} {row.aim}", flush=True)


def command_line(
    about: str,
    module: str,
    launched: Callable[[int], dict[str, float]],
    rows: Callable[[dict[str, float]], Iterable[Figure]],
    *,
    rounds: int,
) -> None:
    """Do what a module's ``main`` does: print the rows of one launch; in that, print what it measured.

    Parameters
    ----------
    launched : callable
        Measures in this interpreter, in so many rounds; returns seconds by name.
    rounds : int
        So many where the command line has no ``--rounds``.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--launch", action="store_true", help="as JSON, measured in this interpreter")
    options = parser.parse_args()
    if options.launch:
        print(json.dumps(launched(options.rounds)))
    else:
        print_rows(rows(launch(module, "--launch", "--rounds", str(options.rounds))))
