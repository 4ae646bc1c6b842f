"""The progress of a map: tqdm's bar where it is installed, else one line."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    """Give two ranks to all tests of this module, and a first use of what stays."""
    with Session(2) as session:
        session.map(abs, [0])
        yield session


@pytest.mark.slow
def test_tqdm_s_bar_shows_what_is_done(two: Session, capfd: pytest.CaptureFixture[str]) -> None:
    """Where tqdm is installed its bar ends at all items; with progress=False nothing is shown."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    two.map(abs, range(7))
    assert "100%|" in (shown := capfd.readouterr().err)
    assert "7/7" in shown
    two.map(abs, range(7), progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_bar_of_a_rank_may_have_any_numbers(two: Session) -> None:
    """What the panel shows of it never makes the user's cell fail."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    cell = """
import io, tqdm
for start, total in (-3, 5), (0, 10**20), (0, float("inf")):
    bar = tqdm.tqdm(total=total, file=io.StringIO())
    bar.update(start)
    bar.refresh()
"""
    assert two.run(cell, namespace={}).values == (None, None)


@pytest.fixture
def without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tqdm as if it were not installed."""
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)


@pytest.mark.slow
@pytest.mark.usefixtures("without_tqdm")
def test_a_line_shows_what_is_done(two: Session, capfd: pytest.CaptureFixture[str]) -> None:
    """Without tqdm one line counts the items, also those of a map that fails."""
    two.map(abs, range(7))
    assert re.search(r"\r7 of 7, \S+ m?s\n$", capfd.readouterr().err)
    done, go_on = nbp.zeros(3), nbp.zeros(1)

    def work(item: int) -> float:
        while item == 0 and not go_on[0]:
            time.sleep(0.001)
        done[item] = 1
        return 1 / item

    def fail_last() -> None:
        wait_until(lambda: done[1:].all())
        time.sleep(0.5)  # the notebook learns of both results
        go_on[0] = 1

    release = threading.Thread(target=fail_last)
    release.start()
    with pytest.raises(ParallelError):
        two.map(work, range(3))
    release.join()
    assert re.fullmatch(r"\r2 of 3 items\r2 of 3, \S+ m?s\n", capfd.readouterr().err)


@pytest.mark.slow
def test_a_broken_bar_is_no_failure(two: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the front end raises is a warning; the results are complete."""

    class Broken:
        def update(self, more: int) -> None:
            raise BrokenPipeError("nobody listens")

    monkeypatch.setattr("nbparallel.session.tasks.item_map.make_bar", lambda total: Broken())
    with pytest.warns(RuntimeWarning, match="no longer shown .*BrokenPipeError"):
        assert two.map(abs, range(-3, 0)) == [3, 2, 1]


def test_a_bar_of_a_rank_is_seen() -> None:
    """The outermost bar of tqdm, in `Session.activity`; not in a map, whose items are counted."""
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    with Session(2) as session:
        go_on = nbp.zeros(1)
        cell = (
            "import time\nfrom tqdm import tqdm\nbar = tqdm(total=40, mininterval=0)\n"
            "for step in range(30 + rank):\n    time.sleep(0.01)\n    bar.update()\n"
            "    for _ in tqdm(range(3), mininterval=0): pass\n"
            "while not go_on[0]: time.sleep(0.01)\nbar.close()"
        )
        pending = session.submit(cell, namespace={"go_on": go_on})
        try:
            wait_until(lambda: [rank.step for rank in session.activity().ranks] == [30, 31])
            for rank in session.activity().ranks:
                assert (rank.steps, rank.items) == (40, 0)
                assert 0.05 < rank.seconds_left < 30
        finally:
            go_on[0] = 1
        pending.result()

        def work(item: int) -> int:
            from tqdm import tqdm

            return sum(1 for _ in tqdm(range(item), mininterval=0))

        assert session.map(work, range(5), progress=False) == list(range(5))
        assert [rank.steps for rank in session.activity().ranks] == [0, 0]
        assert sum(rank.items for rank in session.activity().ranks) == 5
