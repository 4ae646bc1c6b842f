"""Runs CPython's tests of `multiprocessing`, over ours or over the library, in a process of their own."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUITES = {"ours": "tests.multiprocessing.cpython.ours", "library": "test._test_multiprocessing"}
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class SuiteResult:
    """What became of each case."""

    outcomes: dict[str, str]
    text: str

    def named(self, outcome: str) -> set[str]:
        """Return the cases with that outcome: ``ok``, ``skipped``, ``FAIL`` or ``ERROR``."""
        return {case for case, found in self.outcomes.items() if found == outcome}


def run_suite(
    over: str, method: str, kind: str, folder: Path, *, only: str = "", first: str = "sys", limit: float = 600
) -> SuiteResult:
    """Run the cases of one kind ("processes", "manager", "misc", "executor") with one start method.

    Parameters
    ----------
    over : {"ours", "library"}
    only : str
        Part of the names of the cases that run.
    first : str
        A module that is imported before.
    """
    name, prefix = f"suite_{over}_{method}_{kind}", f"mp-{secrets.token_hex(4)}"
    naming = "from multiprocessing import process\n"
    naming += f"process.current_process()._config['semprefix'] = '/{prefix}'\n"
    # of every process: one that the library starts has the word of its parent only when it has been unpickled
    (folder / "sitecustomize.py").write_text(naming if over == "library" else "")
    if kind == "executor":
        text = "from tests.multiprocessing.cpython.executors import executor_cases\n"
        text += f"globals().update(executor_cases({over!r}, {method!r}))\n"
    else:
        option = "exclude_types=True" if kind == "misc" else f"only_type={kind!r}"
        text = f"from {SUITES[over]} import install_tests_in_module_dict\n"
        text += f"install_tests_in_module_dict(globals(), {method!r}, {option})\n"
    (folder / f"{name}.py").write_text(f"import {first}\n{text}")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "unittest", "-v", *(["-k", only] if only else []), name]
    with (folder / f"{name}.txt").open("w+") as output:
        subprocess.run(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        output.seek(0)
        text = output.read()
    for left in Path("/dev/shm").glob(f"sem.{prefix}*"):  # the library's tests end its resource tracker, too
        left.unlink()
    return SuiteResult(_outcomes(text), text)


_CASE = re.compile(r"^(?:[\d.]+s )?(\w+) \([\w.]*?(\w+)\.\w+\)")


def _outcomes(text: str) -> dict[str, str]:
    """Read unittest's report; what a case prints may stand between its name and its outcome."""
    found: dict[str, str] = {}
    case = None
    for line in text.splitlines():
        if line.startswith("====="):
            break
        if match := _CASE.match(line):
            case = f"{match[2]}.{match[1]}"
            found[case] = "died"
        if case is not None and (
            ending := re.search(r"(?:\.\.\. |^)(?:[\d.]+s )*(ok|FAIL|ERROR|skipped)\b", line)
        ):
            found[case] = ending[1]
            case = None
    return found


if __name__ == "__main__":
    over, method, kind, folder, *rest = sys.argv[1:]
    result = run_suite(over, method, kind, Path(folder), only=rest[0] if rest else "")
    print(result.text[-12000:] if rest else result.text[result.text.find("=====") :][:12000])
    counts = {outcome: len(result.named(outcome)) for outcome in set(result.outcomes.values())}
    print(counts, sorted(result.named("FAIL") | result.named("ERROR") | result.named("died")))
