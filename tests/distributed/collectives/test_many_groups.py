"""Many groups: few descriptors and little memory for each, and every operation as in the first."""

from __future__ import annotations

import numpy as np
import pytest

from nbparallel.distributed.collectives.group_collectives import AreaMemory
from nbparallel.distributed.slots.slot_area import group_area, group_nbytes
from nbparallel.session import Session
from nbparallel.sharing import Store

CELL = """
import os, numpy as np
def descriptors():
    return len(os.listdir("/proc/self/fd"))
before = descriptors()
sums, others = [], 0
for number in range(COUNT):
    group = dist.new_group([0, 1], tag=str(number))
    sums.append(all_reduce(number, group=group))
    if number % 2 == 0:
        others += all_reduce(np.full(300_000, rank + 1.0), group=group)[-1] != 3  # staged
    others += all_reduce(np.full(1500, rank + 1.0), group=group)[-1] != 3
    if rank == 1 and number % 50 == 0:
        barrier(group=dist.new_group([1], tag=str(number)))
descriptors() - before, sums == [2 * number for number in range(COUNT)], others
"""


@pytest.mark.time_limit(90)
@pytest.mark.slow
@pytest.mark.parametrize("count", [80, 700])
def test_groups_share_segments(count: int) -> None:
    """Hundreds of groups take some dozen descriptors, also if large arrays were staged in them."""
    with Session(2) as session:
        for _ in range(2):
            values = session.run(CELL.replace("COUNT", str(count))).values
            for descriptors, right, others in values:
                assert descriptors < 130, "as many as groups"
                assert (right, others) == (True, 0)
            session.restart(0)  # another epoch


def test_the_number_of_segments_grows_as_a_logarithm() -> None:
    """Each new one is as large as all before it."""
    store = Store()
    memory = AreaMemory(store)
    areas = [memory.allocate((0, 1)) for _ in range(400)]
    assert len(store.segments()) <= 14
    assert sum(segment.nbytes for segment in store.segments()) < 2 * sum(area.nbytes for area in areas)
    assert {area.nbytes for area in areas} == {group_nbytes(2)}
    spans = sorted((np.asarray(area).__array_interface__["data"][0], area.nbytes) for area in areas)
    ends = [start + nbytes for start, nbytes in spans]
    assert all(start >= end for (start, _), end in zip(spans[1:], ends, strict=False)), "none overlaps"
    for area in areas:
        found = group_area(area, b"x", 1)
        assert found is not None
        assert (found.ranks, found.index) == ((0, 1), 1)
        found.close()
    del area, areas, memory, found
    store.close()
