"""Reductions of shared arrays where they lie: member i combines slice i of all, and writes it to all.

Every input byte is read once and every output byte written once; nothing else is moved.  In blocks of 64 Ki
elements, so that the partial sums of a block stay in the cache until the last input was added.  A broadcast
is done likewise: member i copies slice i of the root's array to all others, so that no core is idle.
"""

from __future__ import annotations

import numpy as np

from nbparallel.distributed.operators import Operator
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
"""Blocks between two looks whether somebody has failed: well under a millisecond."""


def slice_bounds(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return the bounds of a slice of `count` elements; inner bounds are multiples of 64 elements."""
    size = -(-count // parts)
    size = (size + 63) & ~63
    return min(part * size, count), min((part + 1) * size, count)


def direct_all_reduce(
    context: RankContext, protocol: SlotProtocol, x: AnyArray, operator: Operator, *, averaged: bool
) -> None:
    """Combine in place; everybody has left a handle of a C-contiguous array of this size and dtype."""
    index, size = protocol.index, len(protocol.ranks)
    arrays = [
        x.reshape(-1) if i == index else context.memory.attach(bytes(protocol.get(i)), writable=True)
        for i in range(size)
    ]
    start, stop = slice_bounds(x.size, index, size)
    if start < stop:
        context.may_write(protocol.number, protocol.peers)
        blocks = range(start, stop, BLOCK)
        with np.errstate(all="ignore"):  # a warning made an error would leave the others half-way
            for i, begin in enumerate(blocks):
                if i % CHECK_EVERY == CHECK_EVERY - 1:
                    context.check_peers(protocol.peers)
                combine_block(arrays, begin, min(begin + BLOCK, stop), operator, averaged=averaged)
                if fault_injection.ARMED and i == len(blocks) // 2:
                    fault_injection.hit("half_payload", context.rank)
        context.waiter.fence()
        context.words[context.writing] = 0
    protocol.synchronize()


def direct_broadcast(
    context: RankContext, protocol: SlotProtocol, source: AnyArray, targets: list[AnyArray]
) -> None:
    """Copy this member's slice of the bytes of `source` to all targets, as the others do with theirs."""
    start, stop = slice_bounds(source.size, protocol.index, len(protocol.ranks))
    if start < stop:
        context.may_write(protocol.number, protocol.peers)
        blocks = range(start, stop, BLOCK_NBYTES)
        for i, begin in enumerate(blocks):
            if i % CHECK_EVERY == CHECK_EVERY - 1:
                context.check_peers(protocol.peers)
            block = source[begin : min(begin + BLOCK_NBYTES, stop)]
            for target in targets:
                target[begin : begin + block.size] = block
            if fault_injection.ARMED and i == len(blocks) // 2:
                fault_injection.hit("half_payload", context.rank)
        context.waiter.fence()
        context.words[context.writing] = 0
    protocol.synchronize()


def direct_reduce(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    operator: Operator,
    *,
    averaged: bool,
) -> None:
    """Combine this member's slice of all arrays into `target`, which may be one of them."""
    start, stop = slice_bounds(target.size, protocol.index, len(protocol.ranks))
    if start < stop:
        context.may_write(protocol.number, protocol.peers)
        _combine_into(context, protocol, arrays, target, start, stop, 0, operator, averaged=averaged)
        context.waiter.fence()
        context.words[context.writing] = 0
    protocol.synchronize()


def direct_reduce_scatter(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    start: int,
    operator: Operator,
    *,
    averaged: bool,
) -> None:
    """Combine the elements of all arrays from `start` on into `target`, which is none of them."""
    stop = start + target.size
    _combine_into(context, protocol, arrays, target, start, stop, start, operator, averaged=averaged)
    context.check_peers(protocol.peers)  # whoever failed meanwhile may be changing what was just read


def _combine_into(
    context: RankContext,
    protocol: SlotProtocol,
    arrays: list[AnyArray],
    target: AnyArray,
    start: int,
    stop: int,
    origin: int,
    operator: Operator,
    *,
    averaged: bool,
) -> None:
    """Combine elements `start` to `stop` in rank order; `target` begins with element `origin`."""
    ufunc, last = operator.ufunc, len(arrays) - 1
    partial = np.empty(min(BLOCK, stop - start) if last > 1 else 0, target.dtype)
    blocks = range(start, stop, BLOCK)
    with np.errstate(all="ignore"):
        for i, begin in enumerate(blocks):
            if i % CHECK_EVERY == CHECK_EVERY - 1:
                context.check_peers(protocol.peers)
            end = min(begin + BLOCK, stop)
            total = arrays[0][begin:end]
            out = target[begin - origin : end - origin]
            for k in range(1, last):
                total = ufunc(total, arrays[k][begin:end], out=partial[: end - begin])
            ufunc(total, arrays[last][begin:end], out=out)
            if averaged:
                np.true_divide(out, len(arrays), out)
            if fault_injection.ARMED and i == len(blocks) // 2:
                fault_injection.hit("half_payload", context.rank)


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
