"""What other tools for parallel cells lose, hang on or break after (NOTEBOOK's tables), in a real kernel.

Every test ends with a look whether the next cell works, with the same ranks and their variables.
"""

from __future__ import annotations

import re
import time

import pytest

from nbparallel.testing import processes
from nbparallel.testing.waiting import wait_until
from tests.harness.kernel import Kernel
from tests.magics.cells import text, with_ranks

pytestmark = pytest.mark.time_limit(120)


def pids(kernel: Kernel, count: int = 2) -> list[str]:
    """Return every rank's process, after a look at its variable and a collective of all."""
    outcome = kernel.run("%parallel __import__('os').getpid(), kept - rank, all_reduce(1)")
    assert outcome.status == "ok", outcome.traceback
    found = re.findall(rf"\((\d+), 7, {count}\)", text(outcome))
    assert len(found) == count, text(outcome)
    return found


def wait_until_asleep(*pids: int) -> None:
    """Wait until processes have slept for a quarter of a second: all takes its time on a busy machine."""
    awake = time.monotonic()

    def have_slept() -> bool:
        nonlocal awake
        found = [processes.read(pid) for pid in pids]
        if not all(record is not None and record.state == "S" for record in found):
            awake = time.monotonic()
        return time.monotonic() - awake > 0.25

    wait_until(have_slept, pids, seconds=30)


@pytest.mark.slow
def test_await_at_top_level(shared_kernel: Kernel) -> None:
    """It ends, with the value of the last expression; tasks and operations between ranks go on with it."""
    kernel = with_ranks(shared_kernel)
    before = pids(kernel)
    slept = kernel.run("%%parallel\nimport asyncio\nawait asyncio.sleep(0.05)\nprint('slept')\nrank * 2")
    assert text(slept) == "[ranks 0-1] slept\nOut[rank 0]: 0\nOut[rank 1]: 2\n"
    many = kernel.run(
        "%%parallel\nasync def one(n):\n    await asyncio.sleep(0.01)\n    return n + rank\n"
        "sum(await asyncio.gather(*map(one, range(3)))) + all_reduce(1)"
    )
    assert text(many) == "Out[rank 0]: 5\nOut[rank 1]: 8\n"
    failed = kernel.run("%%parallel\nasync def bad():\n    1 / 0\nawait bad()")
    assert "ZeroDivisionError on ranks 0-1, line 4" in failed.evalue
    assert kernel.run("import asyncio; await asyncio.sleep(0, 'here')").result == "'here'"
    assert pids(kernel) == before


@pytest.mark.slow
@pytest.mark.fault("F22", "F24")
def test_only_who_does_not_answer_is_ended(shared_kernel: Kernel) -> None:
    """The second press names it, the third ends it; it comes back, and the other one has lost nothing."""
    kernel = with_ranks(shared_kernel)
    before = pids(kernel)
    cell = kernel.begin(
        "%%parallel\nimport time\nprint('begun', flush=True)\n"
        "if rank:\n    sum(range(10**13))  # looks at no signal\n"
        "else:\n    try:\n        time.sleep(600)\n    finally:\n        print('freed', flush=True)"
    )
    cell.wait_for("begun")
    for word in ("freed", "rank 1 not stopped yet", "rank 1 did not answer the interrupt and was ended"):
        kernel.interrupt()
        cell.wait_for(word)
        wait_until_asleep(kernel.pid, int(before[0]))  # rank 0 is done; signals at once are one
    assert cell.wait().ename == "KeyboardInterrupt"
    again = kernel.run("%%parallel\n'kept' in globals()")
    assert "rank 1 was ended: no answer to the interrupt" in text(again)
    assert "without its variables" in text(again)
    assert text(again).endswith("Out[rank 0]: True\nOut[rank 1]: False\n")
    kernel.run("%rank 1 kept = rank + 7")
    after = pids(kernel)
    assert (after[0], after[1] != before[1]) == (before[0], True)
