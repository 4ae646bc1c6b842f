"""Exchange: the one way in which a group moves values: leave a letter, meet, take from the others' letters.

::

    pack what the others are to get                (small: into the letter; shared arrays: where they lie;
                                                    large private ones: a copy in shared memory, or, if
                                                    those who take them fill buffers, by relay)
    leave the letter in the slot, meet, compare what was called
    compare every form that is brought with the form that is expected, and all shared memory: every member
    does so for all, and comes to the same result
    take from the others' letters, into new values or into the user's buffers
    say that nothing is read any more; who left its own array where it lies waits for that

Nobody writes into another rank's memory, so a failure leaves no late writers.  Copies that this rank made are
held until all have read them, but nobody waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.exchange_record import (
    NOTHING,
    OBJECT_FORM,
    OVERHEAD,
    ExchangeRecord,
    ExchangeRecordBuilder,
    form_word,
    refer,
    reference,
)
from nbparallel.distributed.collectives.staging import Arrival, StagedCopy, StagingBuffers
from nbparallel.distributed.point_to_point.packing import OBJECT, RELAYED, VIEW, Packer
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_plain_array,
    decode_handle,
    encode_handle,
)
from nbparallel.distributed.slots.fingerprint import Fingerprint, fingerprint
from nbparallel.distributed.slots.overlaps import Span, conflict
from nbparallel.distributed.slots.pending_slots import PendingSlot, PendingSlots
from nbparallel.errors import InternalError
from nbparallel.wire.control import Operation

MAX_FORMS = 4096
"""Remembered words; one costs two microseconds."""


Prepared = tuple[bytes, object]
"""A letter, and what must live until it was read."""


class Labels:
    """The fingerprints of one operation, by what is passed to it."""

    def __init__(self, operation: Operation, ranks: Sequence[int], *, later: bool = False) -> None:
        self._name, self._ranks = operation.name + ("+async" if later else ""), ranks
        self._known: dict[Any, Fingerprint] = {}

    def __call__(
        self, values: Sequence[Any], outputs: Iterable[AnyArray], root: int | None, *, view: bool
    ) -> Fingerprint:
        """Return the fingerprint; dtypes and shapes stand in it for people only."""
        brought = tuple([_form_key(value) for value in values])
        expected = tuple([(x.dtype, x.shape) for x in outputs])
        key = (brought, expected, root, view)
        label = self._known.get(key)
        if label is None:
            if len(self._known) >= MAX_FORMS:
                self._known.clear()
            dtypes = list(dict.fromkeys(str(dtype) for dtype, _ in brought or expected))
            shape = _shapes(brought)
            if expected:
                shape += " into " + _shapes(expected)
            rank = None if root is None else self._ranks[root]
            label = self._known[key] = fingerprint(
                self._name, ", ".join(dtypes[:4]) or "-", shape, root=rank, operator="view" if view else "-"
            )
        return label


def _form_key(value: Any) -> tuple[Any, Any]:
    return (value.dtype, value.shape) if isinstance(value, np.ndarray) else (type(value).__name__, None)


def _shapes(forms: Sequence[tuple[Any, Any]]) -> str:
    shapes = ["-" if shape is None else str(shape) for _, shape in forms]
    return shapes[0] if len(shapes) == 1 else f"[{', '.join(shapes)}]" if shapes else "-"


@dataclass(slots=True)
class Movement:
    """One call of an operation that moves values, as one member makes it."""

    operation: Operation
    label: Fingerprint
    values: Sequence[Any]
    """What this member brings: nothing, one value for everybody (or for the root), or one for each member."""
    sources: Sequence[int]
    """The members from whom this one takes."""
    outputs: Mapping[int, AnyArray]
    """Buffers to fill, by the member that they are for; all sources, or none."""
    root: int | None = None
    """The only member that sends or receives, if there is one."""
    to_root: bool = False
    """Whether it receives."""
    view: bool = False


class Exchange:
    """One rank's side of all movements in a group."""

    def __init__(self, context: RankContext, pending_slots: PendingSlots, staging: StagingBuffers) -> None:
        self._context, self._pending_slots = context, pending_slots
        protocol = self._protocol = pending_slots.protocol
        self._relay = StagedCopy(context, protocol, staging)
        self._filled: dict[int, bool] = {}
        """Whether all readers of the last movement had buffers, by its fingerprint: so it will be again."""
        self._packer = Packer(context.store, context.attach, context.memory.look, protocol.payload_nbytes)
        self._forms: dict[tuple[np.dtype[Any], tuple[int, ...]], int] = {}
        self._held: deque[tuple[int, object]] = deque()

    def __call__(self, movement: Movement, deadline_ns: int | None) -> list[Any]:
        """Move; return what came from each of the sources: new values, or the outputs, filled."""
        context, protocol = self._context, self._protocol
        self.release()
        values = _apart(movement.values, movement.outputs)
        relay = not movement.view and self._filled.get(movement.label.word, False)
        draft, keep = self._write(movement, values, relay=relay)
        record, memory = self._fold(draft)
        protocol.deadline_ns = deadline_ns
        protocol.begin(movement.operation, movement.label, context.call_site.line())
        if keep or memory is not None:
            self._held.append((protocol.number, (keep, memory)))
        context.operations += 1
        protocol.put(record)
        if not protocol.arrive_and_wait():
            protocol.compare()
        records, found = self._read(movement, values)
        self._remember_buffers(movement, records)
        if any(record.waits for record in records):
            context.check_peers(protocol.peers)  # who failed may be changing what was just copied
            protocol.announce_done()
            if draft.waits:
                protocol.wait_until_read()
        protocol.release()
        return found

    def _read(self, movement: Movement, values: Sequence[Any]) -> tuple[list[ExchangeRecord], list[Any]]:
        """Compare all letters, and take what is for this member."""
        records = [self._open(i) for i in range(len(self._protocol.ranks))]
        self._check_forms(records, movement)
        self._check_memory(records)
        came: dict[int, AnyArray] = {}
        rounds = max(record.rounds for record in records)
        if rounds:
            came = self._relayed(movement, records, rounds)
        return records, [
            came[i] if i in came else self._take(movement, values, records[i], i) for i in movement.sources
        ]

    def _relayed(self, movement: Movement, records: list[ExchangeRecord], rounds: int) -> dict[int, AnyArray]:
        """Take part in all rounds; return what came in them, by its source."""
        index = self._protocol.index
        came: dict[int, AnyArray] = {}
        arrivals = []
        for source in movement.sources:
            if source == index or not records[source].rounds:
                continue
            message = records[source].payload(source, index)
            form = self._packer.form(message) if message.kind == RELAYED else None
            if form is not None:
                output = movement.outputs.get(source)
                whole = output is not None and output.flags.c_contiguous
                target = output if output is not None and whole else np.empty(form[1], form[0])
                arrivals.append(Arrival(target, bytes(message.body)))
                came[source] = target
                self._context.nbytes += target.nbytes
        self._relay.run(rounds, arrivals)
        for source, array in came.items():
            output = movement.outputs.get(source)
            if output is not None and output is not array:
                np.copyto(output, array)
                came[source] = output
        return came

    def _remember_buffers(self, movement: Movement, records: Sequence[ExchangeRecord]) -> None:
        if movement.values:
            index, root = self._protocol.index, movement.root
            readers = (root,) if movement.to_root else range(len(records))
            if len(self._filled) >= MAX_FORMS:
                self._filled.clear()
            self._filled[movement.label.word] = all(
                records[i].expects for i in readers if i is not None and i != index
            )

    # -- without waiting -----------------------------------------------------------------------------------

    def prepare(self, movement: Movement) -> Prepared:
        """Return a letter of copies: the user's arrays and objects may change from then on."""
        self.release()
        # Also what this member takes itself.
        movement.values = [x.copy() if isinstance(x, np.ndarray) else x for x in movement.values]
        draft, keep = self._write(movement, movement.values)
        record, memory = self._fold(draft)
        return record, (keep, memory)

    def post(self, movement: Movement, prepared: Prepared, line: int) -> PendingSlot:
        """Leave a letter and arrive; there must be a free slot."""
        context, protocol = self._context, self._protocol
        outer = context.open  # posted while another operation waits: that one is still open afterwards
        protocol.begin(movement.operation, movement.label, line)
        self._held.append((protocol.number, prepared[1]))
        context.operations += 1
        protocol.put(prepared[0])
        pending = self._pending_slots.arrive()
        context.open = outer
        return pending

    def collect(self, movement: Movement, pending: PendingSlot) -> list[Any]:
        """Take from the letters of a posted movement, at which all have arrived."""
        with self._pending_slots.resumed(pending):
            self._protocol.compare()
            _, found = self._read(movement, movement.values)
            self._protocol.release(wake=True)
        return found

    def release(self) -> None:
        """Let go of copies that everybody has read."""
        held = self._held
        if held:
            read = self._protocol.all_done()
            while held and held[0][0] <= read:
                held.popleft()

    # -- writing -----------------------------------------------------------------------------------------

    def _write(
        self, movement: Movement, values: Sequence[Any], *, relay: bool = False
    ) -> tuple[ExchangeRecordBuilder, list[object]]:
        """Return the letter, and what must live until it was read."""
        index, size = self._protocol.index, len(self._protocol.ranks)
        inline = (self._protocol.payload_nbytes - 8 * size) // max(1, len(values)) - 2 * OVERHEAD
        readers = 1 if len(values) > 1 or movement.to_root or size == 2 else size - 1
        draft = ExchangeRecordBuilder([], [])
        keep: list[object] = []
        for i, value in enumerate(values):
            array = as_plain_array(value)
            alone = size == 1 or (movement.to_root and movement.root == index)
            own = array is not None and (alone or (len(values) > 1 and i == index))
            own = own and (not movement.view or self._context.store.is_shared(array))
            payload = (
                NOTHING
                if own
                else self._packer.leave(value, inline, view=movement.view, readers=readers, relay=relay)
            )
            draft.payloads.append(payload)
            draft.brought.append(OBJECT_FORM if array is None else self._form(array))
            if array is not None and payload.kind == VIEW and not movement.view:  # with views nobody writes
                self._name_source(draft, array)
            if payload.keepalive is not None or movement.view:
                keep.append((payload.keepalive, value))
            self._context.nbytes += payload.nbytes
        if movement.outputs:
            self._name_outputs(draft, movement)
        relayed = [i for i, payload in enumerate(draft.payloads) if payload.kind == RELAYED]
        if relayed:
            arrays = [as_plain_array(values[i]) for i in relayed]
            bodies, draft.rounds = self._relay.offer([array for array in arrays if array is not None])
            for i, body in zip(relayed, bodies, strict=True):
                draft.payloads[i].body = body
        return draft, keep

    def _name_source(self, draft: ExchangeRecordBuilder, array: AnyArray) -> None:
        location = self._context.store.location(array)
        if location is not None:
            draft.reads = [*draft.reads, (location.segment, location.start, location.stop)]
            draft.waits = True

    def _name_outputs(self, draft: ExchangeRecordBuilder, movement: Movement) -> None:
        outputs = movement.outputs
        if movement.root is not None and not movement.to_root:
            draft.expected = [self._form(outputs[movement.root])]
        else:
            draft.expected = [self._form(outputs[i]) for i in range(len(self._protocol.ranks))]
        writes: list[Span] = []
        for array in outputs.values():
            location = self._context.store.location(array)
            if location is not None:
                writes.append((location.segment, location.start, location.stop))
        draft.writes = writes

    def _form(self, array: AnyArray) -> int:
        key = (array.dtype, array.shape)
        word = self._forms.get(key)
        if word is None:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            word = self._forms[key] = form_word(*key)
        return word

    def _fold(self, draft: ExchangeRecordBuilder) -> tuple[bytes, AnyArray | None]:
        """Return the letter; if it is too long for a slot, where it lies, and that memory."""
        data = draft.pack()
        if len(data) <= self._protocol.payload_nbytes:
            return data, None
        store = self._context.store
        memory = store.empty((len(data),), np.uint8)
        memory[...] = np.frombuffer(data, np.uint8)
        handle = store.handle(memory, writable=False)
        if handle is None:
            raise InternalError("the store's own array is not shared")
        return refer(encode_handle(handle), waits=draft.waits), memory

    # -- reading -----------------------------------------------------------------------------------------

    def _open(self, index: int) -> ExchangeRecord:
        data = self._protocol.get(index)
        packed = reference(data)
        if packed is not None:
            data = self._context.attach(decode_handle(packed), writable=False).data
        return ExchangeRecord(data)

    def _check_forms(self, records: Sequence[ExchangeRecord], movement: Movement) -> None:
        root = None if movement.to_root else movement.root
        for reader, record in enumerate(records):
            if not record.expects:
                continue
            for source, other in enumerate(records):
                expected = record.expected(source, root)
                if expected and expected != other.brought(reader):
                    ranks = self._protocol.ranks
                    raise self._protocol.mismatch(
                        f"what rank {ranks[source]} passed to {movement.operation.name} does not fit the "
                        f"array that rank {ranks[reader]} gave to take it"
                    )

    def _check_memory(self, records: Sequence[ExchangeRecord]) -> None:
        spans = [record.spans() for record in records]
        if not any(writes for mine in spans for _, writes in mine):
            return
        found = conflict(spans)
        if found is not None:
            self._relay.forget()
            raise self._protocol.overlap(*found)

    def _take(self, movement: Movement, values: Sequence[Any], record: ExchangeRecord, source: int) -> Any:
        index = self._protocol.index
        output = movement.outputs.get(source)
        if source == index:
            own = values[index if len(values) > 1 else 0]
            array = as_plain_array(own)
            if array is not None:
                return _own(array, output, view=movement.view)
        message = record.payload(source, index)
        if output is not None:
            self._packer.fill(output, message)
            self._context.nbytes += output.nbytes
            return output
        if message.kind == VIEW:
            array = self._context.memory.look(message.body)
            return _read_only(array) if movement.view else np.array(array, order="C")
        if message.kind == OBJECT:
            message.body = bytes(message.body)
        return self._packer.unpack(message)

    def close(self) -> None:
        """Let go of everything."""
        self._held.clear()


def _own(array: AnyArray, output: AnyArray | None, *, view: bool) -> AnyArray:
    """Return what a member takes from itself."""
    if output is not None:
        np.copyto(output, array)
        return output
    return _read_only(array) if view else np.array(array, order="C")


def _read_only(array: AnyArray) -> AnyArray:
    view = array.view()
    view.flags.writeable = False
    return view


def _apart(values: Sequence[Any], outputs: Mapping[int, AnyArray]) -> Sequence[Any]:
    """Return the values, copied if an output lies over one of them: then the order would matter."""
    if not outputs:
        return values
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if any(np.may_share_memory(value, output) for value in arrays for output in outputs.values()):
        return [np.array(value) if isinstance(value, np.ndarray) else value for value in values]
    return values
