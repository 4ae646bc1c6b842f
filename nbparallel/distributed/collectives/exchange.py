"""Exchange: each member writes a record, waits for all, and reads the records of the others.

::

    pack the values for the other members          (small: into the record; shared arrays: their handles;
                                                    large private arrays: where they lie, if takers can
                                                    read that; a copy in shared memory; or, if all takers
                                                    fill arrays, the staging buffers)
    write the record into the slot, arrive and wait, compare the calls
    compare each form that is sent with the form that is expected, and all spans of shared memory: every
    member compares those of all members, so all come to the same result
    read the other members' records, into new values or into the user's arrays
    release the slot; a member whose own array was read where it lies waits until all have read it

No member writes into another rank's memory, so there are no late writes after a failure.  Copies that this
rank made are held until all members have read them, but no operation waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbparallel.distributed.collectives.exchange_record import (
    FEW,
    NOTHING,
    OBJECT_FORM,
    OVERHEAD,
    ExchangeRecord,
    ExchangeRecordBuilder,
    form_word,
    refer,
    reference,
)
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.collectives.movements import Movement
from nbparallel.distributed.collectives.staging import Arrival, StagedCopy, StagingBuffers
from nbparallel.distributed.point_to_point.packing import OBJECT, PLACE, RELAYED, VIEW, Packer, brings_tensor
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_plain_array,
    copied,
    decode_handle,
    encode_handle,
    may_overlap,
)
from nbparallel.distributed.slots.overlaps import Span, conflict, joined
from nbparallel.distributed.slots.slot_protocol import PendingSlot, PendingSlots, SlotProtocol
from nbparallel.errors import InternalError
from nbparallel.sharing.tensors import is_tensor, tensor_of
from nbparallel.wire.control import Operation

# Writing one member's record for an exchange: what it sends, what it expects, what memory it uses.

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


class PreparedRecord(NamedTuple):
    """A record that is to be written into a slot later."""

    data: bytes
    keepalive: object
    """What it refers to, to be held until it was read."""
    values: Sequence[Any]
    """Copies of the values: what this member takes itself."""


class Exchange:
    """One rank's side of all data movements in a group."""

    def __init__(
        self,
        context: RankContext,
        pending_slots: PendingSlots,
        staging: StagingBuffers,
        in_place: InPlaceReading,
    ) -> None:
        self._context, self._pending_slots, self._in_place = context, pending_slots, in_place
        protocol = self._protocol = pending_slots.protocol
        self._staged_copy = StagedCopy(context, protocol, staging)
        self._filled: dict[int, bool] = {}
        """Whether all takers of the last call filled arrays, by its fingerprint: the next call expects it."""
        self._packer = Packer(context, protocol.payload_nbytes)
        self._writer = ExchangeWriter(context, protocol, self._packer, self._staged_copy, in_place)
        self._held: deque[tuple[int, object]] = deque()

    def __call__(self, movement: Movement, deadline_ns: int | None) -> list[Any]:
        """Move; return what came from each of the sources: new values, or the outputs, filled."""
        context, protocol = self._context, self._protocol
        self.release()
        values = _copied_if_overlapping(movement.values, movement.outputs)
        staged = not movement.view and self._filled.get(movement.fingerprint.word, False)
        builder = self._writer.write(movement, values, staged=staged, waits=not movement.view)
        record = self._writer.pack(builder)
        protocol.deadline_ns = deadline_ns
        protocol.begin(movement.operation, movement.fingerprint, context.call_site.line())
        if builder.keepalive:
            self._held.append((protocol.number, builder.keepalive))
        context.operations += 1
        protocol.put(record)
        if not protocol.arrive_and_wait():
            protocol.compare()
        records, found = self._read(movement, values)
        self._remember_buffers(movement, records)
        if any(record.waits for record in records):
            # One that failed may be changing what was just copied; others may have ended behind the call.
            context.check_peers([protocol.ranks[i] for i in movement.sources if records[i].waits])
            protocol.announce_done()
            if builder.waits:
                protocol.wait_until_read()
        protocol.release()
        return found

    def _read(self, movement: Movement, values: Sequence[Any]) -> tuple[list[ExchangeRecord], list[Any]]:
        """Compare all records, and read the values for this member."""
        records = [self._open(i) for i in range(len(self._protocol.ranks))]
        self._check_forms(records, movement)
        self._check_memory(records)
        came: dict[int, Any] = {}
        rounds = max([record.rounds for record in records])
        if rounds:
            came = self._copy_large(movement, records, rounds)
        return records, [
            came[i] if i in came else self._take(movement, values, records[i], i) for i in movement.sources
        ]

    def _copy_large(self, movement: Movement, records: list[ExchangeRecord], rounds: int) -> dict[int, Any]:
        """Take part in all rounds, and read what lies in its place; return these arrays by their source."""
        index = self._protocol.index
        came: dict[int, Any] = {}
        arrivals = []
        places: dict[int, bytes | memoryview] = {}
        for source in movement.sources:
            if source == index or not records[source].rounds:
                continue
            message = records[source].payload(source, index)
            form = self._packer.form(message) if message.kind in (RELAYED, PLACE) else None
            if form is not None:
                output = movement.outputs.get(source)
                whole = output is not None and output.flags.c_contiguous
                target = came[source] = output if output is not None and whole else np.empty(form[1], form[0])
                if message.kind == PLACE:
                    places[source] = message.body
                else:
                    arrivals.append(Arrival(target, bytes(message.body)))
                    self._in_place.try_to_read(source, target.nbytes)
                self._context.nbytes += target.nbytes
        self._staged_copy.run(rounds, arrivals)
        for step in range(1, len(records) if places else 0):
            source = (index + step) % len(records)  # not all of the same at the same time
            if source in places:
                self._in_place.fetch(source, places[source], came[source])
        if places:
            self._in_place.confirm(places)
        for source, array in came.items():
            output = movement.outputs.get(source)
            if output is not None and output is not array:
                np.copyto(output, array)
                came[source] = output
            elif output is None and brings_tensor(records[source].payload(source, index)):
                came[source] = tensor_of(array)
        return came

    def _remember_buffers(self, movement: Movement, records: Sequence[ExchangeRecord]) -> None:
        if movement.values:
            index, root = self._protocol.index, movement.root
            readers = (root,) if movement.to_root else range(len(records))
            if len(self._filled) >= MAX_FORMS:
                self._filled.clear()
            self._filled[movement.fingerprint.word] = all(
                records[i].expects for i in readers if i is not None and i != index
            )

    # -- nonblocking -------------------------------------------------------------------------------------

    def prepare(self, movement: Movement) -> PreparedRecord:
        """Return the record of a call, with copies: the caller may change its arrays and objects."""
        self.release()
        copies = [copied(x) for x in movement.values]
        builder = self._writer.write(movement, copies)
        return PreparedRecord(self._writer.pack(builder), builder.keepalive, copies)

    def post(self, movement: Movement, record: PreparedRecord, line: int) -> PendingSlot:
        """Write a record and arrive; there must be a free slot."""
        context, protocol = self._context, self._protocol
        outer = context.open  # posted while another operation waits: that one is still open afterwards
        protocol.begin(movement.operation, movement.fingerprint, line)
        self._held.append((protocol.number, record.keepalive))
        protocol.put(record.data)
        pending = self._pending_slots.arrive()
        context.open = outer
        return pending

    def collect(self, movement: Movement, record: PreparedRecord, pending: PendingSlot) -> list[Any]:
        """Read the records of a posted call, at which all members have arrived."""
        with self._pending_slots.resumed(pending):
            self._protocol.compare()
            _, found = self._read(movement, record.values)
            self._protocol.release(wake=True)
        return found

    def release(self) -> None:
        """Release copies that all members have read."""
        held = self._held
        if held:
            read = self._protocol.all_done()
            while held and held[0][0] <= read:
                held.popleft()

    # -- reading -----------------------------------------------------------------------------------------

    def _open(self, index: int) -> ExchangeRecord:
        data = self._protocol.get(index)
        packed = reference(data)
        if packed is not None:
            data = self._context.attach(decode_handle(packed), writable=False).data
        return ExchangeRecord(data)

    def _check_forms(self, records: Sequence[ExchangeRecord], movement: Movement) -> None:
        root = movement.root if movement.from_root else None
        senders = range(len(records)) if root is None else (root,)
        forms: tuple[int | None, ...] = ()
        different: set[int | None] = set()
        if len(records) > FEW:
            forms = tuple([records[source].form for source in senders])
            different = set(forms)
        for reader, record in enumerate(records):
            if not record.expects or (forms and record.accepts(forms, different)):
                continue
            for source in senders:
                expected = record.expected(source)
                if expected and expected != records[source].brought(reader):
                    ranks = self._protocol.ranks
                    what = (
                        f"what rank {ranks[source]} passed to {movement.operation.name} does not fit the "
                        f"array that rank {ranks[reader]} gave to take it"
                    )
                    if movement.operation is Operation.scatter:
                        what += "; only the source passes values, the others pass None or memory for a part"
                    raise self._protocol.mismatch(what)

    def _check_memory(self, records: Sequence[ExchangeRecord]) -> None:
        spans = [record.spans() for record in records]
        if not any(writes for mine in spans for _, writes in mine):
            return
        found = conflict(spans)
        if found is not None:
            self._staged_copy.forget()
            raise self._protocol.overlap(*found)

    def _take(self, movement: Movement, values: Sequence[Any], record: ExchangeRecord, source: int) -> Any:
        index = self._protocol.index
        output = movement.outputs.get(source)
        if source == index:
            own = values[index if len(values) > 1 else 0]
            array = as_plain_array(own)
            if array is not None:
                return _from_itself(own, array, output, view=movement.view)
        message = record.payload(source, index)
        if output is not None:
            self._packer.fill(output, message)
            self._context.nbytes += output.nbytes
            return output
        if message.kind == VIEW:
            if brings_tensor(message):
                return self._packer.unpack(message) if movement.view else self._packer.copy_tensor(message)
            array = self._context.memory.attach_view(message.body)
            self._in_place.try_to_read(source, array.nbytes)
            return _read_only(array) if movement.view else np.array(array, order="C")
        if message.kind == OBJECT:
            message.body = bytes(message.body)
        return self._packer.unpack(message)

    def close(self) -> None:
        """Release all memory."""
        self._held.clear()


def _from_itself(own: Any, array: AnyArray, output: AnyArray | None, *, view: bool) -> Any:
    """Return a member's own value, which is an array or lies in its memory, as the member takes it."""
    if output is not None:
        np.copyto(output, array)
        return output
    if is_tensor(own):
        return tensor_of(array if view else np.array(array, order="C"))
    return _read_only(array) if view else np.array(array, order="C")


def _read_only(array: AnyArray) -> AnyArray:
    view = array.view()
    view.flags.writeable = False
    return view


def _copied_if_overlapping(values: Sequence[Any], outputs: Mapping[int, AnyArray]) -> Sequence[Any]:
    """Return the values, copied if an output overlaps one of them: the order of copies would matter."""
    if not outputs:
        return values
    arrays = [value if isinstance(value, np.ndarray) else as_plain_array(value) for value in values]
    if may_overlap([value for value in arrays if value is not None], [*outputs.values()]):
        return [copied(value) for value in values]
    return values
