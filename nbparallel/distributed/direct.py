"""all_reduce of shared arrays in place: rank i combines slice i of all, and writes it to all.

Every input byte is read once and every output byte written once; nothing else is moved.  In blocks of 64 Ki
elements, so that the partial sums of a block stay in the cache until the last input was added.
"""

from __future__ import annotations

import numpy as np

from nbparallel.distributed import faultpoints
from nbparallel.distributed.meeting import Meeting
from nbparallel.distributed.member import Member
from nbparallel.distributed.memory import AnyArray
from nbparallel.distributed.reduce import Operator

BLOCK = 64 << 10
"""Elements combined at a time: 256 KiB of float32."""
CHECK_EVERY = 16
"""Blocks between two looks whether somebody has failed: well under a millisecond."""


def slice_bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of a slice of `count` elements; inner bounds are multiples of 64 elements."""
    size = -(-count // parts)
    size = (size + 63) & ~63
    return min(part * size, count), min((part + 1) * size, count)


def direct_all_reduce(
    member: Member, meeting: Meeting, x: AnyArray, operator: Operator, *, averaged: bool
) -> None:
    """Combine in place; everybody has left a handle of a C-contiguous array of this size and dtype."""
    rank, world_size = member.rank, member.world_size
    arrays = [
        x.reshape(-1) if r == rank else member.memory.attach(bytes(meeting.get(r)), writable=True)
        for r in range(world_size)
    ]
    start, stop = slice_bounds(x.size, rank, world_size)
    if start < stop:
        member.may_write(meeting.number)
        blocks = range(start, stop, BLOCK)
        with np.errstate(all="ignore"):  # a warning made an error would leave the others half-way
            for i, begin in enumerate(blocks):
                if i % CHECK_EVERY == CHECK_EVERY - 1:
                    member.check_peers()
                combine_block(arrays, begin, min(begin + BLOCK, stop), operator, averaged=averaged)
                if faultpoints.ARMED and i == len(blocks) // 2:
                    faultpoints.hit("half_payload", rank)
        member.waiter.fence()
        member.words[member.writing] = 0
    meeting.again()


def combine_block(
    arrays: list[AnyArray], start: int, stop: int, operator: Operator, *, averaged: bool
) -> None:
    """Combine one block in rank order in the first array, and copy it to the others."""
    first = arrays[0][start:stop]
    ufunc = operator.ufunc
    for array in arrays[1:]:
        ufunc(first, array[start:stop], out=first)
    if averaged:
        np.true_divide(first, len(arrays), first)
    for array in arrays[1:]:
        array[start:stop] = first
