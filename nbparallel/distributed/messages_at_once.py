"""Short messages in one call: what a ping-pong does, without the steps' calls between them.

`send` and `recv` of a short array take eight microseconds of Python, most of which is calling and storing; so
the usual way is written out here once more.  Everything that does not go its usual way (something else came
first, the record wraps around the ring's end, a receive was posted, …) is left to `Receiver`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.packing import ARRAY
from nbparallel.distributed.point_to_point.receiver import Receiver
from nbparallel.distributed.point_to_point.ring import RECORD
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray

SHORT = 32 << 10
"""Bytes up to which an array is short: what a ring takes.  ``python -m benchmarks.operations.tuning``: the
usual way takes more than twice as long at 3 and 12 KiB, and half as long again at 30 KiB."""
MAX_HEADS = 1024


class ShortMessages(Receiver):
    """The messages of one rank, with a quick way for short arrays."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._heads: dict[tuple[np.dtype[Any], tuple[int, ...], int, int], bytes] = {}
        """Records of arrays without their content, by dtype, shape, tag and line; empty: not short."""
        self._descriptions: dict[tuple[np.dtype[Any], tuple[int, ...]], bytes] = {}

    def send_short(self, x: AnyArray, dst: int, tag: int) -> bool:
        """Send a short array; False: nothing was done."""
        line = self._context.call_site.line()
        head = self._heads.get((x.dtype, x.shape, tag, line))
        if head is None:
            head = self._make_head(x, tag, line)
        if not head or self.strict or self._held[dst] or fault_injection.ARMED:
            return False
        data = x.tobytes()
        if not self._out[dst].put_at_once(head + data):
            return False
        context = self._context
        context.operations += 1
        context.nbytes += len(data)
        return True

    def _make_head(self, x: AnyArray, tag: int, line: int) -> bytes:
        head = b""
        if x.nbytes <= SHORT and not x.dtype.hasobject:
            meta = self._packer.meta(x)
            if len(meta) <= SHORT:
                length = RECORD.size + len(meta) + x.nbytes
                head = RECORD.pack(length, len(meta), ARRAY, tag, line, 0) + meta
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[x.dtype, x.shape, tag, line] = head
        return head

    def recv_short(self, buffer: AnyArray, src: int, tag: int) -> bool:
        """Fill `buffer` with the next message of a rank, if that fits; False: nothing was done.

        It waits a short while for the message.
        """
        if self._pending[src] or self._posted or fault_injection.ARMED:
            return False
        meta = self._descriptions.get((buffer.dtype, buffer.shape))
        if meta is None:
            if len(self._descriptions) >= MAX_HEADS:
                self._descriptions.clear()
            short = buffer.nbytes <= SHORT and not buffer.dtype.hasobject
            meta = self._descriptions[buffer.dtype, buffer.shape] = (
                self._packer.meta(buffer) if short else b""
            )
        if not meta:
            return False
        incoming = self._in[src]
        if not incoming.comes():
            self._spun = True
            return False
        number = incoming.take_at_once(buffer, ARRAY, meta, tag)
        if not number:
            return False
        self._newest[src], self._last = number, src
        context = self._context
        context.operations += 1
        context.nbytes += buffer.nbytes
        return True
