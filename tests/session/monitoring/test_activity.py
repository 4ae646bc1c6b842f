"""What ranks do at this moment, read from memory: states, for whom a rank waits, times, segments."""

from __future__ import annotations

import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.session.monitoring.activity import SessionActivity
from nbparallel.testing.waiting import wait_until

SECONDS = 60.0


def waits(now: SessionActivity) -> bool:
    """Return whether rank 0 has waited for a while."""
    return now.ranks[0].state == "waiting" and now.ranks[0].seconds > 0.1


CELL = """\
x = nbp.zeros((1000, 1000))
import os, time
while rank == 1 and not os.path.exists(PATH):
    time.sleep(0.02)
all_reduce(rank)
"""


@pytest.mark.time_limit(90)
def test_a_cell_from_its_begin_to_its_end(tmp_path: object) -> None:
    """Before, during and after a cell; who waits names the rank that is missing; a dead one is called so."""
    with pytest.raises(RuntimeError, match="no ranks are running"):
        Session(2).activity()
    with Session(2) as session:
        before = session.activity()
        assert [rank.state for rank in before.ranks] == ["idle", "idle"]
        assert (before.running, before.seconds, before.segments) == (False, 0.0, 0)
        session.push(PATH=f"{tmp_path}/go")
        assert session.activity().seconds == 0.0, "what the session does by itself is no cell"
        pending = session.submit(CELL, execution_count=7)
        seen = wait_until(lambda: now if waits(now := session.activity()) else None, session.activity)
        first, second = seen.ranks
        assert (first.operation, first.waits_for, first.line) == ("all_reduce", (1,), 5)
        assert (second.state, second.line, second.waits_for) == ("computing", 3, ())
        assert (seen.running, seen.number) == (True, 7)
        assert first.waiting >= first.seconds
        open(f"{tmp_path}/go", "w").close()
        pending.result(SECONDS)
        after = session.activity()
        assert (after.running, [rank.state for rank in after.ranks]) == (False, ["idle", "idle"])
        assert 0 < after.ranks[0].waiting < after.seconds
        assert [rank.operations for rank in after.ranks] == [1, 1]
        assert (after.segments, after.nbytes) == (2, 2 * 8_000_000 + after.nbytes % 8_000_000)
        assert after.seconds == session.activity().seconds, "the clock stands still"
        with pytest.raises(ParallelError):
            session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\nbarrier()")
        assert session.activity().ranks[1].state == "dead"
        assert "SIGKILL" in session.activity().ranks[1].operation
