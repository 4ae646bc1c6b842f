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
PROGRAM = """
import json, statistics, time
import nbparallel as nbp

def main():
    found = {}
    with nbp.Session(RANKS) as session:
        session.run("x = __import__('numpy').ones(1); y = __import__('numpy').ones(1 << 13)")
        for _ in range(20):
            session.run("pass")
        for name, code, calls in (
            ("an empty cell", "pass", CELLS),
            ("all_reduce of 8 B", "for _ in range(2000): all_reduce(x, 'max')", 5),
            ("all_reduce of 64 KiB", "for _ in range(500): all_reduce(y, 'max')", 5),
        ):
            before, began = [*session.run("import time; time.process_time()").values], time.process_time()
            walls = []
            for _ in range(calls):
                start = time.perf_counter()
                session.run(code)
                walls.append(time.perf_counter() - start)
            mine = time.process_time() - began
            after = [*session.run("time.process_time()").values]
            theirs = sum(after) - sum(before)
            found[name] = (statistics.median(walls), (mine + theirs) / calls)
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


def launch(checkout: Path, cells: int) -> dict[str, tuple[float, float]]:
    """Return seconds, and processor seconds of the notebook and all ranks, by what was run."""
    paths = os.pathsep.join(str(checkout / part) for part in (".", "magics", "widgets"))
    program = PROGRAM.replace("RANKS", str(RANKS)).replace("CELLS", str(cells))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a table: the time now by the time then, of neighbouring launches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.one_host", description=__doc__)
    parser.add_argument("older", type=Path, help="folder of the older version")
    parser.add_argument("--launches", type=int, default=9, help="of each version")
    parser.add_argument("--cells", type=int, default=300, help="empty cells in a launch")
    options = parser.parse_args()
    older = options.older.resolve()
    pairs = []
    for turn in range(options.launches):
        found = {}
        for checkout in (older, HERE) if turn % 2 else (HERE, older):
            found[checkout] = launch(checkout, options.cells)
        pairs.append((found[HERE], found[older]))
    print("| now / then | time | processor time |\n|---|---|---|")
    for name in pairs[0][0]:
        ratios = [[now[name][i] / then[name][i] for now, then in pairs] for i in (0, 1)]
        row = [f"{statistics.median(each):.3f} ({min(each):.2f} … {max(each):.2f})" for each in ratios]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
