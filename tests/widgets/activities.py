"""Activities of a session, made by hand: what a panel can be asked to show."""

from __future__ import annotations

from dataclasses import replace

from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.monitoring.segments import SharedSegment

MIB = 1 << 20
IDLE = RankActivity(
    rank=0, pid=10, state="idle", operation="", line=0, waits_for=(), seconds=0.0, computing=0.0,
    waiting=0.0, operations=0, private_nbytes=29 * MIB, mapped_nbytes=153 * MIB,
)  # fmt: skip
FINISHED = replace(IDLE, state="finished", computing=0.3, finished=0.3)
ENDED = replace(IDLE, computing=0.3, waiting=1.7, finished=2.0, operations=1)
WAITING = replace(
    IDLE, state="waiting", operation="all_reduce", line=3, waits_for=(2,), seconds=4.6, computing=0.3,
    waiting=4.6, operations=None,
)  # fmt: skip
COMPUTING = replace(IDLE, state="computing", line=2, computing=4.9, operations=None)


def ranks(*given: RankActivity) -> tuple[RankActivity, ...]:
    """Return them numbered from 0."""
    return tuple(replace(one, rank=i, pid=10 + i) for i, one in enumerate(given))


NONE = SessionActivity(
    running=False, number=0, seconds=0.0, ranks=ranks(IDLE, IDLE, IDLE, IDLE), strategy="file_descriptor",
    segments=0, nbytes=0, pooled_nbytes=0, limit_nbytes=int(20.7 * 1024 * MIB),
)  # fmt: skip
STRAGGLER = replace(
    NONE, running=True, phase="running", number=3, seconds=4.9, segments=3, nbytes=int(153.6 * MIB),
    ranks=ranks(WAITING, WAITING, COMPUTING, WAITING), culprits=(2,),
)  # fmt: skip
DONE = replace(
    STRAGGLER, running=False, phase="finished", seconds=2.0, culprits=(), pooled_nbytes=MIB,
    ranks=ranks(ENDED, ENDED, replace(ENDED, computing=2.0, waiting=0.0), ENDED),
    waited=((0, 0, 1.7, 0), (0, 0, 1.6, 0), (0, 0, 0, 0), (0, 0, 0.5, 0)),
    moved=((0, 10, 0, 0), (0, 0, 3 * MIB, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
)  # fmt: skip
SEGMENTS = (
    SharedSegment(
        1, "file_descriptor", 100 * MIB, "live", "notebook", (0, 1, 2, 3), True, False, False, ("data", "x")
    ),
    SharedSegment(2, "mmap", MIB, "live", "rank 1", (1,), False, True, False, ()),
)
