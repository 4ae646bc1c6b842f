"""Arrays of the notebook to two hosts of a Dask cluster on this machine: seconds, and what workers keep.

``python -m benchmarks.cluster.array_transfer`` prints medians, with ours and Dask's taking turns.
"""

from __future__ import annotations

import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import nbparallel as nbp
from tests.cluster.dask_cluster import DaskProcesses

ROUNDS = 9
NBYTES = 64 << 20
PUSHED = 16
"""Arrays of that size: a gigabyte."""
AIM_SECONDS, AIM_GROWTH = 0.4, 16 << 20


def memory(pid: int, what: str) -> int:
    """Return bytes of resident memory of a process: ``VmRSS`` now, ``VmHWM`` at most."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0 if found is None else int(found[1]) << 10


def main() -> None:
    """Measure, after a look whether what arrives is right."""
    with DaskProcesses("ab") as dask, nbp.Session(cluster=dask.client) as session:
        session.run("pass")
        pids = [dask.processes[host].pid for host in "ab"]
        before = [memory(pid, "VmRSS") for pid in pids]
        names: dict[str, Any] = {"x": np.arange(float(NBYTES // 8))}
        if list(session.run("float(x.sum())", namespace=names).values) != [float(names["x"].sum())] * 4:
            raise RuntimeError("the array has not arrived")
        for number in range(PUSHED):
            names["x"] = np.full(NBYTES // 8, float(number))
            session.run("x.nbytes", namespace=names)
        grown = [memory(pid, "VmHWM") - was for pid, was in zip(pids, before, strict=True)]
        text = ", ".join(f"{nbytes / (1 << 20):.1f} MB" for nbytes in grown)
        print(f"a worker's memory at most, while {PUSHED * NBYTES >> 30} GB is pushed: + {text}")
        print(f"  aim: 16 MB, {'met' if max(grown) <= AIM_GROWTH else 'missed'}")
        workers = list(dask.client.scheduler_info(n_workers=-1)["workers"])
        ours, theirs, empty = list[float](), list[float](), list[float]()
        for round_ in range(ROUNDS):
            x = names["x"] = np.full(NBYTES // 8, float(round_))
            began = time.perf_counter()
            session.run("x.nbytes", namespace=names)
            ours.append(time.perf_counter() - began)
            began = time.perf_counter()
            session.run("x.nbytes", namespace=names)
            empty.append(time.perf_counter() - began)
            began = time.perf_counter()
            dask.client.gather(
                [dask.client.submit(np.size, x, workers=[worker], pure=False) for worker in workers]
            )
            theirs.append(time.perf_counter() - began)
        seconds = statistics.median(ours)
        print(f"64 MB to 2 hosts with a cell: {seconds:.3f} s ({min(ours):.3f}-{max(ours):.3f})")
        print(f"  the same cell again: {statistics.median(empty):.3f} s")
        print(f"  client.submit on both: {statistics.median(theirs):.3f} s")
        print(f"  aim: {AIM_SECONDS} s, {'met' if seconds <= AIM_SECONDS else 'missed'}")


if __name__ == "__main__":
    main()
