"""An empty cell on four running ranks: what a cell costs before it does anything."""

from __future__ import annotations

import statistics

import nbparallel as nbp
from benchmarks.notebook import START_IPYPARALLEL, STOP_IPYPARALLEL, TIMER, answer, run as run_cell
from benchmarks.report import Figure, Section, installed, median_seconds, not_installed, spread
from tests.harness.kernel import Kernel

AIM_SECONDS = 2e-3
AIM_RATIO = 8.0


def run(*, quick: bool) -> Section:
    """Measure at the Session, and in a kernel beside ``%%px``, taking turns."""
    rounds = 30 if quick else 200
    with nbp.Session(4) as session:
        if list(session.run("rank").values) != [0, 1, 2, 3]:
            raise RuntimeError("the ranks do not answer")
        at_session = median_seconds({"ours": lambda: session.run("pass", namespace={})}, rounds)["ours"]
    peer = installed("ipyparallel")
    calls = "ours=magic('parallel', '', 'pass')"
    with Kernel() as kernel:
        run_cell(kernel, "%load_ext nbparallel")
        run_cell(kernel, "%%parallel -n 4\npass")
        run_cell(kernel, TIMER)
        if peer:
            run_cell(kernel, START_IPYPARALLEL, timeout=90)
            calls += ", theirs=magic('px', '', 'pass')"
        times = answer(kernel, f"print(take_turns({rounds}, {calls}))")
        if peer:
            run_cell(kernel, STOP_IPYPARALLEL)
        run_cell(kernel, "%parallel_stop")
    ratio = statistics.median(times["theirs"]) / statistics.median(times["ours"]) if peer else None
    return Section(
        "An empty cell on four running ranks",
        [
            Figure(
                "`session.run('pass')`",
                spread(at_session),
                aim="≤ 2 ms",
                met=statistics.median(at_session) <= AIM_SECONDS,
            ),
            Figure(
                "`%%parallel` in a kernel",
                spread(times["ours"]),
                f"ipyparallel `%%px`: {spread(times['theirs'])}" if peer else not_installed("ipyparallel"),
                ratio,
                f"≥ {AIM_RATIO:g} ×",
                None if ratio is None else ratio >= AIM_RATIO,
            ),
        ],
        "The magics are called inside the kernel: the front end's messages are not counted for either.",
    )
