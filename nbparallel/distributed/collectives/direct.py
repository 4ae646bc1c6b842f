"""Direct access to shared arrays: member i combines slice i of all members' arrays, and writes it to all.

Every input byte is read once and every output byte written once; nothing else is moved.  In blocks of 64 Ki
elements, so that the partial sums of a block stay in the cache until the last input was added.  A broadcast
is done likewise: member i copies slice i of the root's array to all others, so that no core is idle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nbparallel.distributed.operators import Operator, combine, finish_array
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.slots.slot_protocol import SlotProtocol

BLOCK = 64 << 10
"""Elements combined at a time: 256 KiB of float32.  ``python -m benchmarks.operations.tuning``: the best,
128 Ki as good; half of it takes a tenth longer, four times as much a third."""
BLOCK_NBYTES = 512 << 10
"""Bytes copied at a time.  ``python -m benchmarks.operations.tuning``: 256 KiB to 4 MiB are equal within 5
%."""
CHECK_EVERY = 16
"""Blocks between two checks whether another member has failed: well under a millisecond."""


def slice_bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of a slice of `count` elements; inner bounds are multiples of 64 elements."""
    size = -(-count // parts)
    size = (size + 63) & ~63
    return min(part * size, count), min((part + 1) * size, count)


def _for_each_block(
    context: RankContext,
    protocol: SlotProtocol,
    start: int,
    stop: int,
    size: int,
    work: Callable[[int, int], None],
) -> None:
    """Call ``work(begin, end)`` for each block; raises between blocks if another member has failed."""
    blocks = range(start, stop, size)
    with np.errstate(all="ignore"):  # a warning made an error would leave the others half-way
        for i, begin in enumerate(blocks):
            if i % CHECK_EVERY == CHECK_EVERY - 1:
                context.check_peers(protocol.peers)
            work(begin, min(begin + size, stop))
            if fault_injection.ARMED and i == len(blocks) // 2:
                fault_injection.hit("half_payload", context.rank)


def _write_slice(
    context: RankContext, protocol: SlotProtocol, count: int, size: int, work: Callable[[int, int], None]
) -> None:
    """Do this member's slice of `count` elements, which writes other ranks' memory, and synchronize."""
    start, stop = slice_bounds(count, protocol.index, len(protocol.ranks))
    if start < stop:
        context.may_write(protocol.number, protocol.peers)
        _for_each_block(context, protocol, start, stop, size, work)
        context.waiter.fence()
        context.words[context.writing] = 0
    protocol.synchronize()


def direct_all_reduce(context: RankContext, protocol: SlotProtocol, x: AnyArray, operator: Operator) -> None:
    """Combine in place; each member has left a handle of a C-contiguous array of this size and dtype."""
    arrays = [
        x.reshape(-1) if i == protocol.index else context.memory.attach(bytes(protocol.get(i)), writable=True)
        for i in range(len(protocol.ranks))
    ]

    def work(begin: int, end: int) -> None:
        parts = [array[begin:end] for array in arrays]
        combine(operator, parts, parts[0])
        for part in parts[1:]:
            part[...] = parts[0]

    _write_slice(context, protocol, x.size, BLOCK, work)


def direct_scan(
    context: RankContext, protocol: SlotProtocol, x: AnyArray, operator: Operator, *, exclusive: bool
) -> None:
    """Combine in place with all lower members; each has left a handle as for `direct_all_reduce`."""
    arrays = [
        x.reshape(-1) if i == protocol.index else context.memory.attach(bytes(protocol.get(i)), writable=True)
        for i in range(len(protocol.ranks))
    ]
    partial = [np.empty(min(BLOCK, x.size), x.dtype) for _ in range(2)]

    def work(begin: int, end: int) -> None:
        total, following = (part[: end - begin] for part in partial)
        total[...] = arrays[0][begin:end]
        for i, array in enumerate(arrays[1:], 1):
            mine = array[begin:end]
            operator.ufunc(total, mine, out=following)
            mine[...] = total if exclusive else following
            finish_array(operator, mine, i if exclusive else i + 1)
            total, following = following, total

    _write_slice(context, protocol, x.size, BLOCK, work)


def direct_broadcast(
    context: RankContext, protocol: SlotProtocol, source: AnyArray, targets: list[AnyArray]
) -> None:
    """Copy this member's slice of the bytes of `source` to all targets; each member copies its own."""

    def work(begin: int, end: int) -> None:
        block = source[begin:end]
        for target in targets:
            target[begin:end] = block

    _write_slice(context, protocol, source.size, BLOCK_NBYTES, work)


def direct_reduce(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    operator: Operator,
) -> None:
    """Combine this member's slice of all arrays into `target`, which may be one of them."""
    _write_slice(context, protocol, target.size, BLOCK, _combine_blocks(arrays, target, 0, operator))


def direct_reduce_scatter(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    start: int,
    operator: Operator,
) -> None:
    """Combine the elements of all arrays from `start` on into `target`, which is none of them."""
    work = _combine_blocks(arrays, target, start, operator)
    _for_each_block(context, protocol, start, start + target.size, BLOCK, work)
    context.check_peers(protocol.peers)  # a rank that failed may be changing what was just read


def _combine_blocks(
    arrays: list[AnyArray], target: AnyArray, origin: int, operator: Operator
) -> Callable[[int, int], None]:
    """Return what combines a block in rank order; `target` begins with element `origin`."""
    ufunc, last = operator.ufunc, len(arrays) - 1
    partial = np.empty(min(BLOCK, target.size) if last > 1 else 0, target.dtype)

    def work(begin: int, end: int) -> None:
        total = arrays[0][begin:end]
        out = target[begin - origin : end - origin]
        for k in range(1, last):  # not in `out`, which may be one of the arrays
            total = ufunc(total, arrays[k][begin:end], out=partial[: end - begin])
        ufunc(total, arrays[last][begin:end], out=out)
        if operator.finish is not None:
            operator.finish(out, len(arrays))

    return work
