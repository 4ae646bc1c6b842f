"""With many ranks no rank does what grows with the square of their number."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives.exchange import (
    FEW,
    OVERHEAD,
    ExchangeRecord,
    ExchangeRecordBuilder,
)
from nbparallel.distributed.point_to_point.packing import ARRAY, Payload
from nbparallel.distributed.runtime import shared_arrays
from nbparallel.distributed.runtime.rank_context import Peers
from nbparallel.distributed.slots import slot_area
from nbparallel.errors import CollectiveMismatchError
from nbparallel.wire.control_layout import Layout
from tests.harness.ranks import context_of

MANY = 64


def test_no_member_looks_at_every_pair(ranks: Any, monkeypatch: Any) -> None:
    """Arrays that fit are compared as wholes: equal ones, and shards of several lengths."""
    looks: list[int] = []
    expected = ExchangeRecord.expected

    def counted(record: ExchangeRecord, source: int) -> int:
        looks.append(source)
        return expected(record, source)

    monkeypatch.setattr(ExchangeRecord, "expected", counted)

    def work(c: Communicator) -> None:
        me, n = c.rank, c.world_size
        rows = list(np.zeros((n, 3)))
        c.all_gather(rows, np.full(3, float(me)))
        assert [row[0] for row in rows] == [*range(n)]
        shards = [np.zeros(len(part)) for part in np.array_split(np.arange(4 * n + 1), n)]
        c.all_gather(shards, np.ones(len(shards[me])))
        assert all((shard == 1).all() for shard in shards)
        out = np.zeros((n, 2))
        c.all_to_all_single(out, np.arange(2 * n, dtype=float).reshape(n, 2))
        assert (out == [2 * me, 2 * me + 1]).all()
        c.gather(np.ones(2), list(out) if me == 1 else None, dst=1)
        c.scatter(out[0], list(np.ones((n, 2))) if me == 2 else None, src=2)
        assert not looks
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 .* rank 2 gave to take it"):
            c.all_gather([np.zeros(3 + (me == 2 and i == 1)) for i in range(n)], np.zeros(3))
        assert looks == [0, 1]

    ranks(FEW + 1, work)


def test_the_parts_of_an_array_are_one_span(ranks: Any, monkeypatch: Any) -> None:
    """What a record says of shared memory does not grow with the number of its parts."""
    written: list[tuple[int, int]] = []
    pack = ExchangeRecordBuilder.pack

    def noted(builder: ExchangeRecordBuilder) -> bytes:
        written.append((len(builder.reads), len(builder.writes)))
        return pack(builder)

    monkeypatch.setattr(ExchangeRecordBuilder, "pack", noted)

    def work(c: Communicator) -> None:
        store = context_of(c).store
        whole, other = store.zeros((4, 40_000)), store.zeros((4, 40_000))
        c.all_gather(list(whole), other[c.rank])
        c.all_to_all_single(whole, other)
        own_is_inside = c.rank in (1, 2)
        assert written == [(1, 1), (1 + own_is_inside, 1)]

    ranks(4, work)


def test_records_hold_equal_forms_once() -> None:
    """Of as many values as there are ranks; forms that differ are all there."""
    builder = ExchangeRecordBuilder()
    builder.brought, builder.expected = [7] * MANY, [9] * MANY
    alike = builder.pack()
    record = ExchangeRecord(memoryview(alike))
    assert (record.form, record.brought(5), record.expected(5)) == (7, 7, 9)
    assert record.accepts((9,) * MANY, {9})
    assert not record.accepts((*(9,) * (MANY - 1), 8), {8, 9})
    builder.brought, builder.expected = [*range(2, MANY + 2)], [*range(3, MANY + 3)]
    different = builder.pack()
    assert len(different) - len(alike) == 2 * 8 * (MANY - 1)
    record = ExchangeRecord(memoryview(different))
    assert (record.form, record.brought(5), record.expected(5)) == (None, 7, 8)
    forms = tuple(range(3, MANY + 3))
    assert record.accepts(forms, {*forms})
    assert not record.accepts((None, *forms[1:]), {None, *forms[1:]})


def test_a_wait_looks_at_all_ranks_together(ranks: Any, monkeypatch: Any) -> None:
    """As long as none has failed, no rank is asked for alone."""

    def refuse(_: Peers, rank: int) -> bool:
        raise AssertionError(f"rank {rank} was asked for alone")

    def work(c: Communicator) -> None:
        peers = context_of(c).peers
        c.barrier()
        with monkeypatch.context() as patched:
            patched.setattr(Peers, "has_failed", refuse)
            for some in (peers.ranks, (), peers.ranks[:1]):
                assert peers.first_failure(some) is None
            assert peers.all_left(1) == []
            assert peers.all_left(0) == [0, 1, 2]
        c.barrier()

    ranks(3, work)


@pytest.mark.parametrize("members", [2, 9, 33, 64, 128, 300])
def test_a_slot_holds_a_short_value_for_each_member(members: int) -> None:
    """In the world and in groups: else the record has memory of its own, which all others attach."""
    value = np.zeros(1)
    meta = pickle.dumps((value.dtype, value.shape), 5)
    builder = ExchangeRecordBuilder()
    builder.payloads = [Payload(ARRAY, meta, value.tobytes()) for _ in range(members)]
    builder.brought = builder.expected = [*range(1, members + 1)]
    for room in (Layout.of(members).slot_payload, slot_area.group_payload(members)):
        assert len(builder.pack()) <= room
        assert (room - 8 * members) // members - 2 * OVERHEAD >= value.nbytes  # what the writer reckons with


def test_overlaps_of_many_arrays_are_those_of_their_pairs(monkeypatch: Any) -> None:
    """Whatever the strides, and whether there are elements."""
    monkeypatch.setattr(shared_arrays, "FEW_PAIRS", 0)
    chance, memory = random.Random(3), np.zeros(300)
    answers = set()
    for _ in range(300):
        some, others = (
            [memory[(begin := chance.randrange(300)) : begin + chance.randrange(9)][:: chance.choice((1, -2))]
             for _ in range(4)] for _ in range(2)
        )  # fmt: skip
        want = any(np.may_share_memory(x, y) for x in some for y in others)
        assert shared_arrays.may_overlap(some, others) == want
        answers.add(want)
    assert answers == {True, False}
