"""F73: whoever starts ranks may end: a thread, a subshell's, an event loop's; the ranks go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from nbparallel.session import Session


def in_a_thread(start: Callable[[], object]) -> None:
    """Start from a thread that then ends, as ipykernel's subshells do."""
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()


def in_a_loop(start: Callable[[], object]) -> None:
    """Start in an event loop, as a notebook's top-level ``await`` does, from its main and another thread."""

    async def both() -> None:
        start()
        await asyncio.to_thread(start)

    asyncio.run(both())


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("where", [in_a_thread, in_a_loop])
def test_f73_ranks_outlive_the_thread_that_started_them(
    where: Callable[[Callable[[], object]], None],
) -> None:
    """The same processes run the next cells, whichever thread asks; all are gone after a stop."""
    session = Session(2)
    try:
        where(lambda: session.run("x = rank"))
        before = session.statistics()
        time.sleep(0.2)  # a parent-death signal of the thread that has ended would have come by now
        assert session.run("all_reduce(x)").values == [1, 1]
        where(lambda: session.run("x += 1"))
        after = session.statistics()
        assert after.supervisor_pid == before.supervisor_pid
        assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    finally:
        in_a_thread(session.stop)
