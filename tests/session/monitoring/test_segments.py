"""What `Session.statistics` says about shared memory: who made it, who has it, under which names."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.session import Session
from nbparallel.session.diagnostics.doctor import examine


@pytest.mark.slow
def test_statistics_name_users_and_makers() -> None:
    """A real session: the notebook's names with views, the ranks that attached, and what a rank made.

    What it tells, as what `%parallel_who` and `%parallel_doctor` stand on, is frozen.
    """
    namespace: dict[str, Any] = {"x": np.ones(1 << 16), "n": 3}
    namespace["view"] = namespace["x"][::2]
    with Session(3) as session:
        session.run("x.sum()", namespace=namespace, ranks=[0, 2])
        session.run("own = nbp.zeros(1 << 17)", ranks=[1])
        seen = session.statistics()
        assert seen.ledger_answered
        by_maker = {record.maker: record for record in seen.segments}
        mine, theirs = by_maker["notebook"], by_maker["rank 1"]
        assert (mine.names, mine.ranks, mine.notebook) == (("view", "x"), (0, 2), True)
        assert (mine.nbytes, mine.strategy, mine.writable) == (8 << 16, "file_descriptor", False)
        assert (theirs.nbytes, theirs.ranks, theirs.notebook, theirs.writable) == (8 << 17, (1,), False, True)
        assert session.statistics({"other": namespace["x"]}).segments[1].names == ("other",)
        records = [seen, *seen.ranks, *seen.segments, *nbp.segments(), session.who(), *session.who().names]
        for record in [*records, *examine()]:
            with pytest.raises(FrozenInstanceError):
                setattr(record, fields(record)[0].name, None)
        session.run("del own", ranks=[1])
        assert session.statistics().pooled_nbytes >= 8 << 17


@pytest.mark.slow
def test_a_file_opened_for_reading_is_written_by_nobody(tmp_path: Path) -> None:
    """`nbp.from_file` with its default mode gives memory that not even the notebook may write."""
    np.save(tmp_path / "a.npy", np.ones(1 << 17))
    with Session(1) as session:
        for mode, read_only in (("r", True), ("r+", False)):
            x = nbp.from_file(tmp_path / "a.npy", mode=mode)
            session.run("x.sum()", namespace={"x": x})
            # the one before may still be on its way out: the ranks' word that they let it go comes later
            (found,) = [record for record in session.statistics().segments if record.names]
            assert (found.strategy, found.read_only, found.writable) == ("mmap", read_only, not read_only)
            (line,) = [line for line in repr(nbp.segments()).splitlines() if " live " in line]
            assert ("by none" in line) is read_only
            session.run("del x")
            del x


@pytest.mark.slow
def test_a_segment_of_another_session_is_not_mistaken_for_one_of_ours() -> None:
    """Ids of ranks' segments are unique in their session only."""
    with Session(1) as one, Session(1) as other:
        kept = [
            session.run(f"nbp.zeros({size})").values for session, size in ((one, 1 << 17), (other, 1 << 18))
        ]
        for session, size in ((one, 1 << 17), (other, 1 << 18)):
            found = [record for record in session.statistics().segments if record.notebook]
            assert [record.nbytes // 8 for record in found] == [size]
            assert found[0].ranks == (0,)
        del kept


@pytest.mark.slow
def test_statistics_wait_for_nobody_who_cannot_answer() -> None:
    """A stopped supervisor costs at most about a second, and the picture says that it is not complete."""
    with Session(2) as session:
        session.run("pass")
        pid = session.statistics().supervisor_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            seen = session.statistics()
            assert not seen.ledger_answered
            assert len(seen.ranks) == 2
            assert time.monotonic() - started < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert session.statistics().ledger_answered


@pytest.mark.slow
def test_the_sum_is_that_of_the_list() -> None:
    """What a rank sent and let go of by the end of its cell was given back, and is not counted either."""
    with Session(4, read_in_place=False) as session:
        session.run(
            "import numpy as np\nw = np.ones(200_000)\nall_reduce(w)\n"
            "if rank == 0: send(w, 1)\nelif rank == 1: recv(src=0)\nbarrier()"
        )
        seen = session.statistics()
        assert seen.shared_segments == len(seen.segments) >= 4
        assert seen.shared_nbytes == sum(record.nbytes for record in seen.segments)


def test_copies_have_the_names_of_what_was_copied() -> None:
    """Segments with copies of objects are named, in the cell and after it; so is one that is on its way."""
    namespace: dict[str, Any] = {"words": {"x": np.ones(1 << 18)}, "large": [np.ones(1 << 22)]}
    with Session(2) as session:
        session.run("1")
        looks: list[tuple[str, int]] = []
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                activity = session.activity()
                looks.extend([(activity.moving_name, activity.moving_nbytes)] * (activity.phase == "moving"))

        thread = threading.Thread(target=look)
        thread.start()
        pending = session.submit("import time; large, words; time.sleep(0.3)", namespace=namespace)
        names = {record.names for record in session.statistics(namespace).segments}
        pending.result()
        ended.set()
        thread.join()
        assert names >= {("large (copy)",), ("words (copy)",)}
        assert ("large", 8 << 22) in looks
        assert {name for name, _ in looks} <= {"large", "words"}
        held = session.statistics(namespace).segments
        assert ("words (copy)",) in {record.names for record in held if record.phase == "released"}
        session.run("del large, words")
        session.run("1")
        namespace["list"] = [nbp.zeros(1 << 22), nbp.zeros(1 << 18)]
        names = {record.names for record in session.statistics(namespace).segments}
        assert not any("copy" in name for found in names for name in found), "memory that is used again"


@pytest.mark.slow
def test_statistics_from_several_threads() -> None:
    """Threads that ask at the same time each get a whole answer, also while a cell runs."""
    x = nbp.zeros(1 << 17)
    with Session(2) as session:
        seen: list[Any] = []

        def look() -> None:
            seen.extend(session.statistics() for _ in range(20))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            session.run("x[0]", namespace={"x": x})
        for thread in threads:
            thread.join(30)
        assert len(seen) == 80
        assert all(statistics.ledger_answered for statistics in seen)
        assert session.statistics({"x": x}).segments[0].ranks == (0, 1)
