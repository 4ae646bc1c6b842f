"""Messages that a cell has left: reported at its end, and dropped or kept."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session

IN_USE = """
from nbparallel import sharing
sum(s.nbytes for s in sharing.current_store().segments(fetched=False) if s.own and s.phase == "live")
"""


@pytest.mark.fault("F35")
@pytest.mark.time_limit(60)
def test_messages_do_not_cross_cells() -> None:
    """What was not received is named with ranks, tag and line, and no later `recv` takes it."""
    with Session(2) as session:
        result = session.run("x = 1\nfor _ in range(2): send(rank, 1 - rank, tag=3)\nbarrier()")
        assert result.notes == (
            "4 messages were not received, and dropped at the end of the cell: rank 0 to rank 1 2 times, "
            "rank 1 to rank 0 2 times (line 2, tag 3); Session(keep_messages=True) keeps messages for later "
            "ones",
        )
        assert [rank.stderr for rank in result] == ["", ""]
        assert session.pull("x") == [1, 1]
        code = "if rank: send('new', 0, tag=3)\nrecv(src=1, tag=3) if rank == 0 else None"
        result = session.run(code)
        assert (list(result.values), result.notes) == (["new", None], ())
        assert session.run("rank").notes == ()


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.time_limit(60)
def test_a_deadlock_names_what_was_dropped() -> None:
    """The error of the next cell does, whichever rank finds it; the one after that does not."""
    dropped = r"when In\[1\] ended, 1 message was dropped: rank 0 to rank 1 \(line 1, tag 0\)"
    with Session(3) as session:
        session.run("if rank == 0: send('lost', 1)")
        assert session.pull("rank") == [0, 1, 2]  # no cell
        with pytest.raises(ParallelError, match=dropped):
            session.run("recv(src=0) if rank == 1 else barrier(group=dist.new_group([0, 2]))")
        with pytest.raises(ParallelError) as error:
            session.run("recv(src=0) if rank == 1 else None")
        assert "dropped" not in str(error.value)


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.time_limit(60)
def test_messages_for_ranks_outside_the_cell_stay() -> None:
    """Each cell names its own once; cells of the receiver in between change nothing."""
    with Session(3) as session:
        session.start()
        pids = [rank.pid for rank in session.statistics().ranks]
        os.kill(pids[1], signal.SIGSTOP)  # it has taken nothing out of its ring when the next cell ends
        try:
            for number, value in enumerate("ab", start=1):
                result = session.run(f"send('{value}', 1)", ranks=[0])
                line = "1 message stays for rank 1, not in this cell: rank 0 to rank 1 (line 1, tag 0)"
                assert result.notes == (line,), number
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert session.run("rank").notes == ()
        assert session.run("barrier()\nsend(rank, rank)\nrecv(src=rank)").notes == ()
        result = session.run("recv(src=0), recv(return_source=True)", ranks=[1])
        assert list(result.values) == [("a", ("b", 0))]
        assert result.notes == (
            "2 messages of earlier cells were received: rank 0 to rank 1 (line 1 of In[1], tag 0), rank 0 to "
            "rank 1 (line 1 of In[2], tag 0)",
        )
        assert session.run("rank").notes == ()


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.time_limit(60)
def test_what_stays_ends_with_a_failure() -> None:
    """The first cell after it says so, and only of what had not been received."""
    with Session(2) as session:
        session.run("send(1, 1)\nsend(2, 1, tag=7)", ranks=[0])
        with pytest.raises(ParallelError):
            session.run("recv(src=0) if rank else None\n1 / 0")
        lost = "1 message of earlier cells was dropped, because a cell failed or the ranks changed: "
        assert session.run("rank").notes == (lost + "rank 0 to rank 1 (line 2 of In[1], tag 7)",)
        session.run("send(1, 1)", ranks=[0])
        session.resize(3)
        assert lost in "".join(session.run("rank").notes)
        assert session.run("if rank == 0: send(0, 1)").notes[0].startswith("1 message was not received")


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_messages_can_be_kept() -> None:
    """Then the receiver's cell says from which cell they are, and so do errors."""
    with Session(2, keep_messages=True) as session:
        result = session.run("send(np.ones(3), 1 - rank, tag=3)", namespace={"np": np})
        kept = "2 messages were not received, and kept for later cells: rank 0 to rank 1, rank 1 to rank 0 "
        assert result.notes == (kept + "(line 1, tag 3)",)
        code = """
from nbparallel.errors import CollectiveMismatchError
try:
    recv(np.ones(4), src=1 - rank, tag=3)
except CollectiveMismatchError as error:
    said = str(error)
(recv(src=1 - rank, tag=3) == 1).all(), said
"""
        result = session.run(code)
        for rank, (right, said) in result.values.items():
            assert right
            assert f"`x = recv(src={1 - rank}, tag=3)` still receives it" in said
            assert "1 of In[1]" in said
        late = "2 messages of earlier cells were received: rank 0 to rank 1, rank 1 to rank 0 "
        assert result.notes == (late + "(line 1 of In[1], tag 3)",)
        session.run("if rank == 0: send(0, 1, tag=4)")
        with pytest.raises(ParallelError, match=r"what has arrived: tag 4 from rank 0 of In\[3\]"):
            session.run("recv(src=0) if rank else None")
        session.keep_messages = False
        assert "dropped" in session.run("if rank == 0: send(0, 1, tag=4)").notes[-1]


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_calls_and_background_cells(capsys: pytest.CaptureFixture[str], two_ranks: Session) -> None:
    """A function's messages are named where its output goes, a background cell's in its result."""

    def one_way() -> None:
        import nbparallel.distributed as dist

        dist.isend(dist.get_rank(), 1 - dist.get_rank())

    two_ranks.call(one_way)
    assert "nbparallel: 2 messages were not received, and dropped at the end of the call: rank 0 to " in (
        capsys.readouterr().err
    )
    pending = two_ranks.submit("isend('text', rank)\nbarrier()")
    (note,) = pending.result().notes
    assert "rank 0 to rank 0, rank 1 to rank 1 (line 1, tag 0)" in note
    with pytest.raises(ParallelError, match="waits in recv"):
        two_ranks.run("recv(src=rank)")


@pytest.mark.slow
@pytest.mark.fault("F35")
@pytest.mark.time_limit(60)
def test_memory_of_dropped_messages_is_released(two_ranks: Session) -> None:
    """Of copies, streams, shared arrays and pickles, private or by handle; streams work after it."""
    send = """
import numpy as np
if rank == 0:
    for tag in range(3):
        send(np.full(20_000, tag), 1, tag=tag)
    send(np.ones(600_000), 1)
    send([nbp.zeros(400_000)], 1)
    send("x" * 2_000_000, 1)
    send(nbp.ones(400_000), 1, view=True)
barrier()
"""
    receive = """
buffer = np.empty(20_000, int)
if rank == 0:
    for tag in range(20):
        send(np.full(20_000, tag), 1, tag=tag)
else:
    for tag in range(20):
        recv(buffer, src=0, tag=tag)
        assert (buffer == tag).all()
"""
    two_ranks.run("import numpy as np\n" + receive)
    for _ in range(3):
        (note,) = two_ranks.run(send).notes
        assert note.startswith("7 messages were not received")
        two_ranks.run("pass")  # both ranks have dropped what there was
        assert two_ranks.run(IN_USE, ranks=[0]).values[0] == 0
        assert two_ranks.run(receive).notes == ()


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_streams_that_stay_survive_those_that_are_dropped(two_ranks: Session) -> None:
    """A message that stays is whole, though later ones of the same stream were dropped or received."""
    prime = "import numpy as np\nx = np.zeros(20_000)\nrecv(x, src=0) if rank else send(x, 1)"
    two_ranks.run(prime)
    two_ranks.run("send(np.full(20_000, 1.0), 1, tag=1)", ranks=[0])
    (note,) = two_ranks.run("if rank == 0: send(np.full(20_000, 2.0), 1, tag=2)").notes
    assert note.startswith("1 message was not received, and dropped")
    many = """
if rank == 0:
    for i in range(9): send(np.full(20_000, 3.0 + i), 1)
barrier()  # they have taken the places of chunks that count as taken
if rank:
    for i in range(9):
        recv(x, src=0)
        assert (x == 3.0 + i).all()
"""
    assert two_ranks.run(many).notes == ()
    assert two_ranks.run("recv(x, src=0, tag=1)\nx.min(), x.max()", ranks=[1]).values[1] == (1.0, 1.0)


@pytest.mark.time_limit(60)
def test_what_is_left_is_counted_right(two_ranks: Session) -> None:
    """Random cells: messages of all sizes, some received, over several turns of the rings."""
    draw = random.Random(7)
    for _ in range(40):
        sizes = [draw.choice((0, 1, 3, 500, 9000)) for _ in range(draw.randrange(12))]
        received = draw.randrange(len(sizes) + 1)
        order = draw.choice(("sizes", "reversed(sizes)"))
        code = f"""
sizes = {sizes}
if rank == 0:
    for size in sizes:
        send(bytes(size), 1, tag=size)
barrier()
if rank == 1:
    for size in list({order})[:{received}]:
        recv(src=0, tag=size)
"""
        if order != "sizes":
            sizes.reverse()
        left = Counter(sizes[received:])
        notes = two_ranks.run(code).notes
        total = sum(left.values())
        assert len(notes) == bool(left)
        assert not left or notes[0].startswith(f"{total} message{'s' if total > 1 else ''} ")
