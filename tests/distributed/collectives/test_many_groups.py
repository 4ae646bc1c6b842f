"""Many groups: few descriptors and little memory for each, and every operation as in the first."""

from __future__ import annotations

import pytest

from nbparallel.session import Session

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
