"""With many ranks no rank does what grows with the square of their number."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import exchange
from nbparallel.distributed.collectives.exchange import OVERHEAD, record_of
from nbparallel.distributed.point_to_point.packing import ARRAY, Payload
from nbparallel.distributed.runtime import shared_arrays
from nbparallel.distributed.slots import slot_area
from nbparallel.errors import CollectiveMismatchError
from nbparallel.wire.control_layout import Layout

MANY = 64


def test_no_member_looks_at_every_pair(ranks: Any, monkeypatch: Any) -> None:
    """Arrays that fit are compared as wholes: equal ones, and shards of several lengths."""
    looks: list[int] = []

    def counted(senders: Any, *forms: Any, strict: bool) -> Any:
        looks.append(len(senders))
        return zip(senders, *forms, strict=strict)

    monkeypatch.setattr(exchange, "zip", counted, raising=False)

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
        assert looks == [n]

    ranks(5, work)


@pytest.mark.parametrize("members", [2, 9, 33, 64, 128, 300])
def test_a_slot_holds_a_short_value_for_each_member(members: int) -> None:
    """In the world and in groups: else the record has memory of its own, which all others attach."""
    value = np.zeros(1)
    meta = pickle.dumps((value.dtype, value.shape), 5)
    payloads = [Payload(ARRAY, meta, value.tobytes()) for _ in range(members)]
    forms = [(1 << 63) + i for i in range(members)]
    data = record_of(payloads, forms, forms, [], True)
    for room in (Layout.of(members).slot_payload, slot_area.group_payload(members)):
        assert len(data) <= room
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
