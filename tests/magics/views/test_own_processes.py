"""Tables of the notebook's processes and of the memory of their messages."""

from __future__ import annotations

import pytest

from nbparallel.multiprocessing.household import HouseholdReport
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.inspection import IntroducedRow, LedgerRow
from nbparallel_magics.views.status import own_segments_table, processes_table
from tests.harness.kernel import Kernel

FIRST, SECOND = 1 << 22, (1 << 22) + 1
REPORT = HouseholdReport(
    processes=(
        IntroducedRow(FIRST, 2**22 + 7, 0, daemon=True),
        IntroducedRow(SECOND, 2**22 + 8, FIRST, daemon=False),
    ),
    segments=(
        LedgerRow(1, 1 << 20, True, (0, FIRST)),
        LedgerRow(2, 1 << 30, True, (), messages=3),
        LedgerRow(3, 1 << 10, True, ()),
    ),
    supervisor=1,
)


def test_processes_of_any_depth() -> None:
    """Which process started which, what it uses; what messages hold is said below."""
    text = repr(processes_table(REPORT))
    assert text.splitlines() == [
        "2 processes of nbparallel.multiprocessing",
        "    pid  state      started by  ends with it  shared memory that it uses",
        "4194311  has ended  notebook    yes           1.0 MiB in 1 segment",
        "4194312  has ended  4194311",
        "messages that no process has received yet hold 1.0 GiB in 1 segment: %parallel_segments lists them",
    ]
    assert "<table" in processes_table(REPORT)._repr_html_()


def test_segments_and_messages() -> None:
    """The largest first; memory that only waits for its next use is left out."""
    assert repr(own_segments_table(REPORT)).splitlines() == [
        "shared memory of processes of nbparallel.multiprocessing: 1.0 GiB in 2 segments",
        "segment   GiB  used by            messages in flight",
        "0x2       1.0                                      3",
        "0x1      <0.1  notebook, 4194311",
    ]


SETUP = """
%load_ext nbparallel
import numpy as np, nbparallel as nbp, nbparallel.multiprocessing as mp
x = nbp.ones(1_000_000)
queue, end = mp.Queue(), mp.Event()
def wait(end):
    ready.set()  # it is known by now, not yet when its parent has started it
    end.wait()
def outer(array, end):
    inner = mp.Process(target=wait, args=(end,), name="inner")
    inner.start()
    inner.join()
"""


@pytest.mark.slow
def test_in_a_notebook(kernel: Kernel) -> None:
    """Both magics show them without ranks too, and nothing when they have ended."""

    def shown(magic: str) -> str:
        outcome = kernel.run(magic)
        assert outcome.status == "ok", outcome.traceback
        texts = [m.content["data"]["text/plain"] for m in outcome.messages if m.kind == "display_data"]
        return "\n".join(texts)

    assert kernel.run(SETUP).status == "ok"
    assert "nbparallel.multiprocessing" not in shown("%parallel_status")
    start = (
        "ready = mp.Event(); a = mp.Process(target=outer, args=(x, end), name='A'); a.start(); ready.wait()"
    )
    assert kernel.run(f"{start}\nqueue.put(np.ones(100_000))\nwhile queue.empty(): pass").status == "ok"
    status = shown("%parallel_status")
    pid = kernel.run("print(a.pid)").stdout.strip()
    assert status.startswith("2 processes of nbparallel.multiprocessing"), status
    rows = [line.split() for line in status.splitlines()]
    assert [pid, "A"] in [row[:2] for row in rows], status
    assert any(pid in row[1:] for row in rows), status  # which started the other
    assert "messages that no process has received yet hold 784.0 KiB in 1 segment" in status, status
    segments = shown("%parallel_segments")
    assert f"7.6  notebook, {pid}" in segments, segments
    assert kernel.run("queue.get(); end.set(); a.join()").status == "ok"
    # the inner process has no parent that waits for it
    wait_until(lambda: "nbparallel.multiprocessing" not in shown("%parallel_status"))
