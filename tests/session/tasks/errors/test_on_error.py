"""``on_error="continue"``: everybody runs to its end, but nobody waits for the failed."""

from __future__ import annotations

import pytest

from nbparallel.errors import ParallelError, PeerFailedError, RankDiedError
from nbparallel.session import Session


@pytest.fixture
def three(three_ranks: Session) -> Session:
    """Three ranks."""
    three_ranks.run("import os, time")
    return three_ranks


def _failing(session: Session, cell: str, on_error: str = "continue") -> ParallelError:
    with pytest.raises(ParallelError) as caught:
        session.run(cell, on_error=on_error)
    return caught.value


@pytest.mark.slow
def test_ranks_that_compute_run_to_their_end(three: Session) -> None:
    """Also beyond the second after which a cell that stops interrupts them; their values are there."""
    error = _failing(three, "1 / 0 if rank == 1 else time.sleep(1.5)\nrank * 10")
    assert list(error.errors) == [1]
    assert {rank: part.value for rank, part in error.result.ranks.items()} == {0: 0, 1: None, 2: 20}
    assert list(three.run("barrier(); rank").values) == [0, 1, 2]


TALK = """
if rank == 2:
    raise ValueError("mine")
time.sleep(0.3)
if rank == 0:
    send("ball", 1)
    answer = recv(src=1)
else:
    ball = recv(src=0)
    time.sleep(0.3)
    send(ball + " back", 0)
rank if rank else answer
"""


@pytest.mark.slow
def test_others_go_on_talking(three: Session) -> None:
    """A wait for a rank that has not failed is no failure; in a cell that stops it is."""
    error = _failing(three, TALK)
    assert list(error.errors) == [2]
    assert [error.result.ranks[rank].value for rank in (0, 1)] == ["ball back", 1]
    stopped = _failing(three, TALK, "stop")
    assert isinstance(stopped.errors[0], PeerFailedError)


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.fault("F2")
@pytest.mark.parametrize("end", ["raise ValueError('mine')", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("call", ["barrier()", "recv(src=2)", "all_reduce(1)"])
def test_nobody_waits_for_the_failed(three: Session, end: str, call: str) -> None:
    """Who does is freed and says who it was."""
    error = _failing(three, f"if rank == 2:\n    {end}\nif rank == 0:\n    time.sleep(0.2)\n{call}")
    assert sorted(error.errors) == [0, 1, 2]
    for rank in (0, 1):
        found = error.errors[rank]
        assert isinstance(found, PeerFailedError)
        assert found.rank == 2
    assert next(iter(error.errors)) == 2
    assert isinstance(error.errors[2], ValueError | RankDiedError)
    assert list(three.run("barrier(); rank").values) == [0, 1, 2]


@pytest.mark.slow
def test_any_source_waits_for_who_is_left(three: Session) -> None:
    """And fails when nobody is."""
    error = _failing(
        three,
        "if rank == 2:\n    raise ValueError('mine')\n"
        "if rank == 1:\n    time.sleep(0.5)\n    send('from 1', 0)\n    raise KeyError('later')\n"
        "got = recv()\nprint(got)\nrecv()",
    )
    assert error.result.ranks[0].stdout == "from 1\n"
    assert isinstance(error.errors[0], PeerFailedError)


@pytest.mark.slow
def test_another_word_is_refused(three: Session) -> None:
    """Before anything runs."""
    with pytest.raises(ValueError, match="on_error must be one of stop, continue"):
        three.run("x = 1", on_error="ignore")
