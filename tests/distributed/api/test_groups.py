"""Groups: named by members and tag, made without talking, nested, overlapping, many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveMismatchError, DeadlockError


def test_names_and_group_ranks(ranks: Any) -> None:
    """Places and ranks are told apart; equal groups are the same; wrong ones raise on the caller."""

    def work(c: Communicator) -> None:
        me = c.rank
        group = c.new_group([3, 1])
        assert group == c.new_group((1, 3)) != c.new_group([1, 3], tag="b")
        assert c.get_process_group_ranks(group) == [1, 3]
        assert c.get_rank(group) == {1: 0, 3: 1}.get(me, -1)
        assert c.get_world_size(group) == (2 if me in (1, 3) else -1)
        assert c.get_group_rank(group, 3) == 1
        assert c.get_global_rank(group, 1) == 3
        assert c.get_rank() == me
        assert c.get_world_size() == 4
        for ranks, error in (([0, 0], ValueError), ([4], ValueError), ([], ValueError), ([0.5], TypeError)):
            with pytest.raises(error):
                c.new_group(ranks)
        with pytest.raises(ValueError, match="not in the group"):
            c.get_group_rank(group, 0)
        with pytest.raises(ValueError, match="ranks 0-1"):
            c.get_global_rank(group, 2)
        with pytest.raises(TypeError, match="new_group"):
            c.all_reduce(1, group=[1, 3])  # type: ignore[arg-type]
        if me in (1, 3):
            with pytest.raises(ValueError, match=r"src=0 is not in the group of ranks 1, 3"):
                c.broadcast(1, src=0, group=group)
            assert c.broadcast(me, group_src=1, group=group) == 3
        else:
            for call in (
                c.barrier,
                lambda group: c.all_reduce(1, group=group),
                lambda group: c.send(1, 1, group),
            ):
                with pytest.raises(ValueError, match=rf"rank {me} is not in the group of ranks 1, 3"):
                    call(group=group)
        assert c.all_reduce(1, group=c.new_group()) == 4

    ranks(4, work)


def test_split(ranks: Any) -> None:
    """Split orders by key, then by rank; None is in no group; it nests."""

    def work(c: Communicator) -> None:
        me = c.rank
        halves = c.split(me % 2)
        assert halves is not None
        assert c.all_gather(me, group=halves) == [me % 2, me % 2 + 2]
        backwards = c.split(0, key=-me)
        assert c.all_gather(me, group=backwards) == [3, 2, 1, 0]
        assert c.get_rank(backwards) == 3 - me
        assert c.broadcast(me, group_src=0, group=backwards) == 3
        some = c.split(7 if me < 3 else None)
        assert (some is None) == (me == 3)
        if some is not None:
            pair = c.split(0 if me else 1, group=some)
            assert c.all_gather(me, group=pair) == ([0] if me == 0 else [1, 2])
        with pytest.raises(TypeError, match="color"):
            c.split(0.5)  # type: ignore[arg-type]
        c.barrier()

    ranks(4, work)


def test_messages_of_groups_stay_apart(ranks: Any) -> None:
    """A message in one group is not taken in another, with the same tag; any source means any member."""

    def work(c: Communicator) -> None:
        one, other = c.new_group([0, 1]), c.new_group([0, 1], tag="other")
        if c.rank == 0:
            c.send("world", 1)
            c.send("one", 1, group=one)
            c.send("other", 1, group=other)
        elif c.rank == 1:
            assert c.recv(src=0, group=other) == "other"
            assert c.recv(group=one) == "one"
            assert c.recv() == "world"
        c.barrier()

    ranks(3, work)


@pytest.mark.slow
@pytest.mark.fault("F34")
def test_deadlocks_across_groups(outcomes: Any) -> None:
    """Ranks that wait for each other in different groups are told: group, members, line."""

    def work(c: Communicator) -> str:
        first, second = c.new_group([0, 1], "first"), c.new_group([0, 1, 2], "second")
        if c.rank < 2:
            c.barrier(first)
        c.barrier(second)
        with pytest.raises(DeadlockError) as error:
            c.barrier(first if c.rank == 0 else second)
        return str(error.value)

    line = work.__code__.co_firstlineno + 6
    for outcome in outcomes(3, work):
        assert outcome.error is None, outcome
        text = outcome.value
        assert f"rank 0 waits in barrier of the group of ranks 0-1 for rank 1 (line {line})" in text
        assert f"rank 1 waits in barrier of the group of ranks 0-2 for rank 0 (line {line})" in text
        assert "rank 2 waits in barrier of the group of ranks 0-2" in text


@pytest.mark.fault("F34")
def test_deadlocks_before_a_group_has_met(outcomes: Any) -> None:
    """A first operation whose first member waits elsewhere is a deadlock, seen by those outside as well."""

    def work(c: Communicator) -> str:
        group = c.new_group([0, 1])
        with pytest.raises(DeadlockError) as error:
            c.all_reduce(1, group=group) if c.rank == 1 else c.recv(src=1 if c.rank == 0 else 0)
        return str(error.value)

    for outcome in outcomes(3, work):
        assert outcome.error is None, outcome
        assert "rank 1 waits in the first operation of a group for rank 0" in outcome.value
        assert "rank 0 waits in recv(src=1)" in outcome.value


@pytest.mark.fault("F31")
def test_a_forgotten_call(outcomes: Any) -> None:
    """Members that finished the cell without the call are named, before and after the group has met."""
    for met in (False, True):

        def work(c: Communicator, met: bool = met) -> str:
            group = c.new_group([1, 2])
            if c.rank == 0:
                return ""
            if met:
                c.barrier(group)
            if c.rank == 1:
                return ""
            with pytest.raises(CollectiveMismatchError) as error:
                c.all_reduce(np.ones(3), group=group)
            return str(error.value)

        found = outcomes(3, work)
        assert all(outcome.error is None for outcome in found), found
        assert "rank 1 finished the cell" in found[2].value


@pytest.mark.fault("F32")
def test_a_mismatch_names_the_members(outcomes: Any) -> None:
    """The table of a group has its members' ranks, and the world's rank as the root."""

    def work(c: Communicator) -> str:
        group = c.new_group([1, 3])
        if c.rank in (0, 2):
            return ""
        with pytest.raises(CollectiveMismatchError) as error:
            c.reduce(np.ones(3), 4 - c.rank, group=group)
        return str(error.value)

    found = outcomes(4, work)
    for outcome in (found[1], found[3]):
        rows = [line.split() for line in outcome.value.splitlines()[2:]]
        assert [row[:5] for row in rows] == [
            ["1", "reduce", "float64", "(3,)", "3"],
            ["3", "reduce", "float64", "(3,)", "1"],
        ]


def test_in_a_cell_of_some_ranks(ranks: Any) -> None:
    """In a cell of some ranks the world is refused, and a group works if all its members are there."""

    def work(c: Communicator) -> None:
        assert c.all_gather(c.rank, group=c.new_group([0, 3])) == [0, 3]
        with pytest.raises(ValueError, match="ranks 1-2 are not in this cell"):
            c.all_gather(1)
        with pytest.raises(ValueError, match=r"rank 1 is not in this cell.*group of ranks 0-1, 3"):
            c.barrier(group=c.new_group([0, 1, 3]))
        c.barrier(group=c.new_group([3, 0]))

    ranks(4, work, participants=(0, 3))
