"""One host, beside an older checkout of the library in turns: what sessions on hosts cost those without.

python -m benchmarks.cluster.one_host OLDER [--launches 9]

OLDER is a folder with another version, as ``git worktree add OLDER COMMIT`` makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RANKS = 4
HERE = Path(__file__).resolve().parent.parent.parent
WORK = {
    "an empty cell": ("pass", 25),
    "all_reduce of 8 B": ("for _ in range(500): all_reduce(x, 'max')", 1),
    "all_reduce of 64 KiB": ("for _ in range(100): all_reduce(y, 'max')", 1),
}
"""By what is measured: a cell, and how many of it are a turn."""
PROGRAM = """
import json, statistics, sys, time
import nbparallel as nbp

def used(session):
    return time.process_time() + sum(session.run("time.process_time()").values)

def main():
    with nbp.Session(RANKS) as session:
        session.run("import time; x = __import__('numpy').ones(1); y = __import__('numpy').ones(1 << 13)")
        for _ in range(50):
            session.run("pass")
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            code, calls = json.loads(line)
            before, walls = used(session), []
            for _ in range(calls):
                start = time.perf_counter()
                session.run(code)
                walls.append(time.perf_counter() - start)
            print(json.dumps([statistics.median(walls), used(session) - before]), flush=True)

if __name__ == "__main__":
    main()
"""


class Version:
    """A session of one version, which runs cells when it is asked; each is alone at work then.

    Parameters
    ----------
    checkout : Path
        Where the version lies.
    """

    def __init__(self, checkout: Path) -> None:
        paths = os.pathsep.join(str(checkout / part) for part in (".", "magics", "widgets"))
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("RANKS", str(RANKS))],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> object:
        """Return the next line that the session's program prints."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def turn(self, code: str, calls: int) -> tuple[float, float]:
        """Return the median seconds of a cell, and processor seconds of the notebook and all ranks."""
        assert self._process.stdin is not None
        print(json.dumps([code, calls]), file=self._process.stdin, flush=True)
        seconds, used = self.answer()  # type: ignore[misc]
        return seconds, used

    def end(self) -> None:
        """End the session; raise if it ends badly."""
        self._process.communicate(timeout=60)
        if self._process.returncode:
            raise RuntimeError(f"a session ended with exit code {self._process.returncode}")


def compare(older: Path, turns: int) -> dict[str, list[float]]:
    """Return how many times as much time and processor time is taken now: medians of neighbouring turns."""
    versions = {checkout: Version(checkout) for checkout in (older, HERE)}
    for version in versions.values():
        version.answer()
    ratios: dict[str, list[list[float]]] = {name: [] for name in WORK}
    for turn in range(turns):
        for name, (code, calls) in WORK.items():
            order = (older, HERE) if turn % 2 else (HERE, older)
            found = {checkout: versions[checkout].turn(code, calls) for checkout in order}
            ratios[name].append([now / then for now, then in zip(found[HERE], found[older], strict=True)])
    for version in versions.values():
        version.end()
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in ratios.items()
    }


def main() -> None:
    """Print a table: the time now by the time then, medians of launches, with the least and the most."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.one_host", description=__doc__)
    parser.add_argument("older", type=Path, help="folder of the older version")
    parser.add_argument("--launches", type=int, default=9, help="of each version, two at a time")
    parser.add_argument("--turns", type=int, default=40, help="of each version in a launch")
    options = parser.parse_args()
    older = options.older.resolve()
    found = [compare(older, options.turns) for _ in range(options.launches)]
    print("| now / then | time | processor time |\n|---|---|---|")
    for name in WORK:
        columns = zip(*(launch[name] for launch in found), strict=True)
        row = [f"{statistics.median(each):.3f} ({min(each):.2f} … {max(each):.2f})" for each in columns]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
