"""What waiting costs: an idle session, and a rank that waits in ``recv``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import nbparallel as nbp
from benchmarks.report import Figure, Section
from nbparallel.testing import processes

WAIT = """
import time
if rank == 0:
    started, used = time.perf_counter(), time.process_time()
    recv(src=1)
    share = (time.process_time() - used) / (time.perf_counter() - started)
elif rank == 1:
    time.sleep(SECONDS)
    send(1, 0)
share if rank == 0 else None
"""


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that these processes have used, in nanosecond steps (``schedstat`` of every thread)."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def run(*, quick: bool) -> Section:
    """Watch four idle ranks, supervisor and template, and this process; then a blocked recv."""
    seconds = 2.0 if quick else 10.0
    with nbp.Session(4) as session:
        session.run("pass")
        pids = [os.getpid(), *(record.pid for record in processes.family(os.getpid()))]
        before, started = cpu_seconds(pids), time.perf_counter()
        time.sleep(seconds)
        idle = (cpu_seconds(pids) - before) / (time.perf_counter() - started)
        result = session.run(WAIT.replace("SECONDS", str(seconds / 2)), namespace={})
        blocked = float(result.values[0])
    return Section(
        "Waiting",
        [
            Figure(
                f"idle session of 4 ranks: CPU of all {len(pids)} processes",
                f"{idle:.3%} of a core",
                aim="0 %",
                met=idle < 1e-3,
            ),
            Figure("a blocked `recv`", f"{blocked:.2%} of a core", aim="< 1 %", met=blocked < 0.01),
        ],
        f"Over {seconds:g} s; the process that holds the session is counted, too.",
    )
