"""Writing one member's record for an exchange: what it sends, what it expects, what memory it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.exchange_record import (
    NOTHING,
    OBJECT_FORM,
    OVERHEAD,
    ExchangeRecordBuilder,
    form_word,
    refer,
)
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import Movement
from nbparallel.distributed.collectives.staging import StagedCopy
from nbparallel.distributed.point_to_point.packing import PLACE, RELAYED, VIEW, Packer
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_plain_array, encode_handle
from nbparallel.distributed.slots.overlaps import Span, joined
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import InternalError

MAX_FORMS = 4096
"""Remembered words; computing one takes two microseconds."""


class ExchangeWriter:
    """Writes one rank's records in a group."""

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        packer: Packer,
        staged: StagedCopy,
        in_place: InPlaceReading,
    ) -> None:
        self._context, self._protocol, self._packer, self._staged = context, protocol, packer, staged
        self._in_place = in_place
        self._index, self._size = protocol.index, len(protocol.ranks)
        self._forms: dict[tuple[np.dtype[Any], tuple[int, ...]], int] = {}

    def write(
        self, movement: Movement, values: Sequence[Any], *, staged: bool = False, waits: bool = False
    ) -> ExchangeRecordBuilder:
        """Return the record of a call.

        Parameters
        ----------
        values : sequence
            Those of `movement`, or copies.
        staged : bool
            Whether large private arrays go through the staging buffers, for which all takers fill arrays.
        waits : bool
            Whether the call can wait until others have read its arrays where they lie.
        """
        builder = ExchangeRecordBuilder()
        budget = (self._protocol.payload_nbytes - 8 * self._size) // max(1, len(values)) - 2 * OVERHEAD
        readers = 1 if len(values) > 1 or movement.to_root or self._size == 2 else self._size - 1
        several = waits and readers > 1
        only_here = self._size == 1 or (movement.to_root and movement.root == self._index)
        own = self._index if len(values) > 1 else -1
        for i, value in enumerate(values):
            array = as_plain_array(value)
            if (
                array is not None
                and (only_here or i == own)
                and (not movement.view or self._context.store.is_shared(array))
            ):
                payload = NOTHING  # no other member takes it
            else:
                payload = self._packer.leave(
                    value, budget, view=movement.view, readers=readers, relay=staged or several
                )
            builder.payloads.append(payload)
            builder.brought.append(OBJECT_FORM if array is None else self._form(array))
            if payload.keepalive is not None or movement.view:
                builder.keepalive.append((payload.keepalive, value))
            if array is not None and payload.kind == VIEW and not movement.view:
                self._add_read(builder, array)
            self._context.nbytes += payload.nbytes
        if movement.outputs:
            self._add_outputs(builder, movement)
        if staged or several:
            self._settle_large(builder, movement, values, budget, readers, staged=staged)
        if builder.reads:
            builder.reads = joined(builder.reads)
        return builder

    def _add_read(self, builder: ExchangeRecordBuilder, array: AnyArray) -> None:
        """Record that others read the user's own array: no member may write it, and this one waits."""
        location = self._context.store.location(array)
        if location is not None:
            builder.reads.append((location.segment, location.start, location.stop))
            builder.waits = True

    def _add_outputs(self, builder: ExchangeRecordBuilder, movement: Movement) -> None:
        """Record the forms of the arrays to fill, and the shared memory that filling them writes."""
        outputs = movement.outputs
        expected = [movement.root] if movement.from_root else range(self._size)
        builder.expected = [self._form(outputs[i]) for i in expected if i is not None]
        writes: list[Span] = []
        for array in outputs.values():
            location = self._context.store.location(array)
            if location is not None:
                writes.append((location.segment, location.start, location.stop))
        builder.writes = joined(writes) if writes else writes

    def _settle_large(
        self,
        builder: ExchangeRecordBuilder,
        movement: Movement,
        values: Sequence[Any],
        budget: int,
        readers: int,
        *,
        staged: bool,
    ) -> None:
        """Say how those arrays come that are only announced so far: in place if their takers can read them.

        Else copy their first pieces into the staging buffers, or, without `staged`, all of them.
        """
        arrays: dict[int, AnyArray] = {}
        for i, payload in enumerate(builder.payloads):
            array = as_plain_array(values[i]) if payload.kind == RELAYED else None
            if array is None:
                continue
            if place := self._in_place.offer_to(self._takers(movement, i, len(values)), array):
                # What stands for a value may be a copy (of a conjugated tensor), that only this refers to.
                payload.kind, payload.body, payload.keepalive = PLACE, place, array
                builder.waits, builder.rounds = True, 1
            elif staged:
                arrays[i] = array
            else:
                copied = self._packer.leave(values[i], budget, view=False, readers=readers)
                builder.payloads[i] = copied
                builder.keepalive.append((copied.keepalive, values[i]))
        if arrays:
            bodies, builder.rounds = self._staged.offer(list(arrays.values()))
            for i, body in zip(arrays, bodies, strict=True):
                builder.payloads[i].body = body

    def _takers(self, movement: Movement, place: int, count: int) -> Sequence[int]:
        """Return the members that take the value at a place of so many."""
        if count > 1:
            return (place,)
        return (movement.root,) if movement.to_root and movement.root is not None else range(self._size)

    def _form(self, array: AnyArray) -> int:
        key = (array.dtype, array.shape)
        word = self._forms.get(key)
        if word is None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            word = self._forms[key] = form_word(*key)
        return word

    def pack(self, builder: ExchangeRecordBuilder) -> bytes:
        """Return the record for the slot; one that is too long lies in shared memory of its own."""
        data = builder.pack()
        if len(data) <= self._protocol.payload_nbytes:
            return data
        store = self._context.store
        memory = store.empty((len(data),), np.uint8)
        memory[...] = np.frombuffer(data, np.uint8)
        handle = store.handle(memory, writable=False)
        if handle is None:
            raise InternalError("the store's own array is not shared")
        builder.keepalive.append(memory)
        return refer(encode_handle(handle), waits=builder.waits)
