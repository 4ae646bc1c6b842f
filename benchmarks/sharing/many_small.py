"""Ten thousand arrays of a hundred floats, shared with four processes: time and descriptors.

python -m benchmarks.sharing.many_small [--count N] [--launches N]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

import nbparallel as nbp
from benchmarks.report import Figure, Section, human_seconds, installed, not_installed
from benchmarks.sharing.sharing_peers import WORKERS, Torch
from nbparallel.sharing import current_store

COUNT, LENGTH = 10_000, 100
AIM_DESCRIPTORS = 64


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def ours(session: nbp.Session, count: int) -> tuple[float, int, int]:
    """Share and hand over; return seconds, and how many descriptors notebook and rank hold more."""
    private = [np.full(LENGTH, float(number)) for number in range(count)]
    right = float(sum(range(count)))
    names: dict[str, Any] = {}
    cell = "import os\nsum(float(x[0]) for x in xs), len(os.listdir('/proc/self/fd'))"
    before = _descriptors()
    empty = session.run("import os\nlen(os.listdir('/proc/self/fd'))", namespace=names, show_values=False)
    began = time.perf_counter()
    names["xs"] = [nbp.share(x) for x in private]
    found = session.run(cell, namespace=names, show_values=False).values
    took = time.perf_counter() - began
    if [total for total, _ in found] != [right] * WORKERS:
        raise AssertionError(f"ranks sum {list(found)}, not {right}")
    here = _descriptors() - before
    there = max(now - then for (_, now), then in zip(found, empty.values, strict=True))
    if not all(map(nbp.is_shared, names["xs"][:: max(1, count // 100)])):
        raise AssertionError("not shared")
    names.clear()
    session.run("pass", namespace=names)
    current_store().drain()
    return took, here, there


def torch_seconds(torches: Torch, count: int) -> tuple[float, int, int] | str:
    """Do the same with tensors; or return what stood in the way."""
    import torch

    private = [torch.full((LENGTH,), float(number), dtype=torch.float64) for number in range(count)]
    right = float(sum(range(count)))
    before = _descriptors()
    empty = [there for _, there in torches.hand_over([])]
    began = time.perf_counter()
    try:
        found = torches.hand_over(private)
    except (RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    took = time.perf_counter() - began
    if [total for total, _ in found] != [right] * WORKERS:
        raise AssertionError(f"workers sum {found}, not {right}")
    here = _descriptors() - before
    there = max(now - then for (_, now), then in zip(found, empty, strict=True))
    torches.drop()
    return took, here, there


def measure(count: int) -> dict[str, tuple[float, int, int] | str]:
    """Measure all contenders once, in a process of its own: what runs out of descriptors cannot go on."""
    words = [sys.executable, "-m", "benchmarks.sharing.many_small", "--count", str(count), "--once"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, tuple[float, int, int] | str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def _measure_here(count: int) -> dict[str, tuple[float, int, int] | str]:
    found: dict[str, tuple[float, int, int] | str] = {}
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(nbp.Session(WORKERS))
        ours(session, 10)
        found["nbparallel"] = ours(session, count)
        for strategy in ("file_system", "file_descriptor") if installed("torch") else ():
            torches = Torch(strategy)
            stack.callback(torches.close)
            found[torches.name] = torch_seconds(torches, count)
    return found


def _text(seconds: float, here: int, there: int, count: int) -> str:
    return f"{human_seconds(seconds / count)} each, {here} and {there} descriptors"


def figures(count: int, launches: int) -> list[Figure]:
    """Return a row for each peer."""
    collected: dict[str, list[Any]] = {}
    for _ in range(launches):
        for name, each in measure(count).items():
            collected.setdefault(name, []).append(each)
    medians = {}
    for name, all_of_it in collected.items():
        numbers = [each for each in all_of_it if not isinstance(each, str)]
        medians[name] = tuple(map(statistics.median, zip(*numbers, strict=True))) if numbers else all_of_it[0]
    seconds, here, there = medians.pop("nbparallel")
    value = _text(seconds, int(here), int(there), count)
    what = f"{count:,} arrays of {LENGTH} floats"
    few = max(here, there) <= AIM_DESCRIPTORS
    rows = [Figure(f"{what}: descriptors", f"{int(max(here, there))}", aim=f"≤ {AIM_DESCRIPTORS}", met=few)]
    for name, found in medians.items():
        if isinstance(found, str):
            rows.append(Figure(what, value, f"{name} fails: {found}"))
            continue
        peer = f"{name}: {_text(found[0], int(found[1]), int(found[2]), count)}"
        rows.append(Figure(what, value, peer, found[0] / seconds, "ahead", found[0] > seconds))
    if not medians:
        rows.append(Figure(what, value, not_installed("torch")))
    return rows


def run(*, quick: bool) -> Section:
    """Measure with ten thousand arrays."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Section(
        "Many small arrays",
        figures(COUNT // 10 if quick else COUNT, 1 if quick else 3),
        "Private arrays are shared and handed to four processes as one list; each process reads all of them. "
        "Descriptors: how many more the notebook and a rank (a worker) hold; "
        f"the limit of open files is {limit}.",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--launches", type=int, default=1)
    parser.add_argument("--once", action="store_true", help="one launch; print it as a Python literal")
    options = parser.parse_args()
    if options.once:
        print(_measure_here(options.count))
        return
    for row in figures(options.count, options.launches):
        ratio = f"{row.ratio:8.1f} ×" if row.ratio else ""
        print(f"{row.what}: {row.value:40}{row.peer:70}{ratio:>10} {row.aim}", flush=True)


if __name__ == "__main__":
    main()
