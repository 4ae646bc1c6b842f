"""Exchange: each member writes a record, waits for all, and reads the records of the others.

::

    pack the values for the other members          (small: into the record; shared arrays: their handles;
                                                    large private arrays: where they lie, if takers can
                                                    read that; else in the buffer that this rank keeps,
                                                    or a new one in shared memory)
    write the record into the slot, arrive and wait, compare the calls
    compare each form that is sent with the form that is expected, and all spans of shared memory: every
    member compares those of all members, so all come to the same result
    read the other members' records, into new values or into the user's arrays
    release the slot; a member whose own array was read where it lies waits until all have read it

No member writes into another rank's memory, so there are no late writes after a failure.  Copies that this
rank made are held until all members have read them, but no operation waits for that.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nbparallel.distributed.collectives.direct import KeptBuffer
from nbparallel.distributed.collectives.in_place import InPlaceReading, is_address
from nbparallel.distributed.collectives.movements import Movement
from nbparallel.distributed.point_to_point.packing import (
    OBJECT,
    PLACE,
    VIEW,
    Envelope,
    Packer,
    Payload,
    brings_tensor,
)
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    as_plain_array,
    copied,
    decode_handle,
    encode_handle,
    may_overlap,
)
from nbparallel.distributed.slots.slot_area import Span, conflict, joined
from nbparallel.distributed.slots.slot_protocol import PendingSlot, PendingSlots, SlotProtocol
from nbparallel.errors import InternalError
from nbparallel.sharing.tensors import is_tensor, tensor_of
from nbparallel.wire.control import Operation

# Exchange records: what each rank writes into its slot for a data movement.
#
# A record holds payloads (one for all members, or one for each), the *form* of each payload (dtype and shape,
# or "an object", as one word), the forms of the arrays that its writer fills, and the shared memory that it
# reads or writes.  So every member can check what every other member sends and expects, before any array is
# written::
#
#     head | forms sent | forms expected | spans | offsets | payloads
#
# Forms that are all the same are written once: so a member that moves equal arrays need not look at every
# pair of members, whose number is the square of theirs.
#
# A record that is too long for a slot lies in shared memory of its own (indirect), and the slot holds its
# handle.

_HEAD = struct.Struct("<BBHHHHQ")
"""Inline or indirect, whether the writer waits for readers; numbers of payloads, forms sent, forms expected
and spans; the length of an indirect record's handle."""
_PAYLOAD = struct.Struct("<BxH")
"""Kind, and length of the description before the body."""
_SPAN = struct.Struct("<QQQ")
INLINE, INDIRECT = 1, 2
OBJECT_FORM = 1
"""The form of a value that is not an array."""
_WRITES = 1 << 63
OVERHEAD = 64
"""An upper bound of what a payload takes beside its own bytes."""
FEW = 4
"""Up to so many members pairs are compared one by one, which is quicker."""
NOTHING = Payload(0, b"", b"")
"""Stands for a value that only its own member takes."""


@functools.lru_cache(maxsize=4096)
def form_word(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return dtype and shape as one word: equal for arrays that can be copied into each other."""
    text = repr((dtype.str, str(dtype), shape)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


def packed_payload(payload: Payload) -> bytes:
    """Return a payload as bytes."""
    return _PAYLOAD.pack(payload.kind, len(payload.meta)) + payload.meta + payload.body


def message_of(data: memoryview, writer: int) -> Envelope:
    """Return a member's payload; its body is a view of these bytes."""
    kind, length = _PAYLOAD.unpack_from(data)
    middle = _PAYLOAD.size + length
    return Envelope(writer, 0, kind, 0, 0, bytes(data[_PAYLOAD.size : middle]), data[middle:])


@dataclass(slots=True)
class ExchangeRecordBuilder:
    """A record that is being written."""

    payloads: list[Payload] = field(default_factory=list)
    """None, one for all takers, or one for each member."""
    brought: list[int] = field(default_factory=list)
    """Their forms."""
    expected: Sequence[int] = ()
    """Forms of the arrays to fill: one (from the only member that sends), or one for each member; 0: any."""
    reads: list[Span] = field(default_factory=list)
    """The writer's own shared memory that other members read."""
    writes: Sequence[Span] = ()
    """The shared memory that the writer of the record will write."""
    waits: bool = False
    """Whether the writer waits until all members have read its memory."""
    keepalive: list[object] = field(default_factory=list)
    """What the record refers to, to be held until it was read."""

    def pack(self) -> bytes:
        """Return the record as bytes."""
        bodies = [packed_payload(payload) for payload in self.payloads]
        spans = [_SPAN.pack(*span) for span in self.reads]
        if self.writes:
            spans += [_SPAN.pack(segment | _WRITES, start, stop) for segment, start, stop in self.writes]
        count, brought, expected = len(bodies), _once(self.brought), _once(self.expected)
        forms = struct.pack(f"<{len(brought) + len(expected)}Q", *brought, *expected)
        offset = _HEAD.size + len(forms) + _SPAN.size * len(spans) + 8 * (count + 1)
        offsets = [offset]
        for body in bodies:
            offset += len(body)
            offsets.append(offset)
        head = _HEAD.pack(INLINE, self.waits, count, len(brought), len(expected), len(spans), 0)
        return b"".join([head, forms, *spans, struct.pack(f"<{count + 1}Q", *offsets), *bodies])


def _once(forms: Sequence[int]) -> Sequence[int]:
    """Return the first of many forms that are all the same, else all of them."""
    return forms[:1] if len(forms) > FEW and len(set(forms)) == 1 else forms


def refer(packed: bytes, *, waits: bool) -> bytes:
    """Return the slot's content for an indirect record, by the handle of its memory."""
    return _HEAD.pack(INDIRECT, waits, 0, 0, 0, 0, len(packed)) + packed


def reference(data: memoryview) -> bytes | None:
    """Return the handle of an indirect record, None for an inline one."""
    kind, *_, length = _HEAD.unpack_from(data)
    return None if kind == INLINE else bytes(data[_HEAD.size : _HEAD.size + length])


class ExchangeRecord:
    """A record as its readers see it."""

    __slots__ = ("_brought", "_data", "_expected", "_payloads", "_spans", "waits")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        head = _HEAD.unpack_from(data)
        _, waits, self._payloads, self._brought, self._expected, self._spans, _ = head
        self.waits = bool(waits)

    @property
    def expects(self) -> bool:
        """Whether its writer fills arrays."""
        return bool(self._expected)

    @property
    def form(self) -> int | None:
        """The form of the value for every member; 0 if there is none, None if they differ."""
        return self._word(0) if self._brought == 1 else None if self._brought else 0

    def brought(self, reader: int) -> int:
        """Return the form of the value for a member; 0 if there is none."""
        if not self._brought:
            return 0
        start = _HEAD.size + (8 * reader if self._brought > 1 else 0)
        return int.from_bytes(self._data[start : start + 8], "little")

    def expected(self, source: int) -> int:
        """Return the form that is expected of a member that sends; 0 accepts any."""
        start = _HEAD.size + 8 * (self._brought + (source if self._expected > 1 else 0))
        return int.from_bytes(self._data[start : start + 8], "little")

    def accepts(self, forms: tuple[int | None, ...], different: set[int | None]) -> bool:
        """Whether exactly these forms are expected of the members that send, which are all `different` ones.

        One that is None stands for several: those have to be compared one by one.
        """
        if self._expected == 1:
            return different == {self._word(self._brought)}
        start = _HEAD.size + 8 * self._brought
        return struct.unpack_from(f"<{self._expected}Q", self._data, start) == forms

    def _word(self, at: int) -> int:
        start = _HEAD.size + 8 * at
        return int.from_bytes(self._data[start : start + 8], "little")

    def spans(self) -> list[tuple[Span, bool]]:
        """Return the spans of shared memory, and whether each is written."""
        start = _HEAD.size + 8 * (self._brought + self._expected)
        found = []
        for i in range(self._spans):
            segment, first, last = _SPAN.unpack_from(self._data, start + i * _SPAN.size)
            found.append(((segment & ~_WRITES, first, last), bool(segment & _WRITES)))
        return found

    def payload(self, writer: int, reader: int) -> Envelope:
        """Return the payload for a member; its body is a view of the slot."""
        at = reader if self._payloads > 1 else 0
        table = _HEAD.size + 8 * (self._brought + self._expected) + _SPAN.size * self._spans
        start, stop = struct.unpack_from("<QQ", self._data, table + 8 * at)
        return message_of(self._data[start:stop], writer)


# Writing one member's record for an exchange: what it sends, what it expects, what memory it uses.

MAX_CALLS = 4096
"""Calls of which is remembered whether takers filled arrays."""


class ExchangeWriter:
    """Writes one rank's records in a group."""

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        packer: Packer,
        in_place: InPlaceReading,
        buffer: KeptBuffer,
    ) -> None:
        self._context, self._protocol, self._packer = context, protocol, packer
        self._in_place, self._buffer, self._lent = in_place, buffer, 0
        self._index, self._size = protocol.index, len(protocol.ranks)

    def write(
        self, movement: Movement, values: Sequence[Any], *, filled: bool = False, waits: bool = False
    ) -> ExchangeRecordBuilder:
        """Return the record of a call.

        Parameters
        ----------
        values : sequence
            Those of `movement`, or copies.
        filled : bool
            Whether all takers are expected to fill arrays: a single one that does not keeps a copy.
        waits : bool
            Whether the call can wait until others have read its arrays where they lie.
        """
        builder, self._lent = ExchangeRecordBuilder(), 0
        budget = (self._protocol.payload_nbytes - 8 * self._size) // max(1, len(values)) - 2 * OVERHEAD
        readers = 1 if len(values) > 1 or movement.to_root or self._size == 2 else self._size - 1
        readable = waits and (filled or readers > 1)
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
                takers = self._takers(movement, i, len(values))
                offer = functools.partial(self._offer, takers) if readable else None
                payload = self._packer.leave(value, budget, view=movement.view, readers=readers, offer=offer)
            builder.payloads.append(payload)
            builder.brought.append(OBJECT_FORM if array is None else form_word(array.dtype, array.shape))
            if payload.kind == PLACE:
                builder.waits = True  # so its memory need not be held for longer
            elif payload.keepalive is not None or movement.view:
                builder.keepalive.append((payload.keepalive, value))
            if array is not None and payload.kind == VIEW and not movement.view:
                self._add_read(builder, array)
            self._context.nbytes += payload.nbytes
        if movement.outputs:
            self._add_outputs(builder, movement)
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
        builder.expected = [form_word(outputs[i].dtype, outputs[i].shape) for i in expected if i is not None]
        writes: list[Span] = []
        for array in outputs.values():
            location = self._context.store.location(array)
            if location is not None:
                writes.append((location.segment, location.start, location.stop))
        builder.writes = joined(writes) if writes else writes

    def leave(self, x: Any) -> Payload:
        """Return a value as a payload of a slot of its own, for all other members."""
        array, self._lent = as_plain_array(x), 0
        used = OVERHEAD + (0 if array is None else len(self._packer.meta(array)))
        offer = functools.partial(self._offer, range(self._size))
        room = self._protocol.payload_nbytes - used
        return self._packer.leave(x, room, view=False, readers=self._size - 1, offer=offer)

    def _offer(self, takers: Sequence[int], array: AnyArray) -> bytes:
        """Return where takers find an array: in its place, or in this rank's buffer; empty: nowhere."""
        place = self._in_place.offer_to(takers, array)
        if not place and (place := self._buffer.lend(flat_octets(array), self._lent)):
            self._lent += array.nbytes
        return place

    def _takers(self, movement: Movement, place: int, count: int) -> Sequence[int]:
        """Return the members that take the value at a place of so many."""
        if count > 1:
            return (place,)
        return (movement.root,) if movement.to_root and movement.root is not None else range(self._size)

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
        in_place: InPlaceReading,
        buffer: KeptBuffer,
    ) -> None:
        self._context, self._pending_slots = context, pending_slots
        self._in_place, self._buffer = in_place, buffer
        protocol = self._protocol = pending_slots.protocol
        self._filled: dict[int, bool] = {}
        """Whether all takers of the last call filled arrays, by its fingerprint: the next call expects it."""
        self._packer = Packer(context, protocol.payload_nbytes)
        self.writer = ExchangeWriter(context, protocol, self._packer, in_place, buffer)
        self._held: deque[tuple[int, object]] = deque()

    def __call__(self, movement: Movement, deadline_ns: int | None) -> list[Any]:
        """Move; return what came from each of the sources: new values, or the outputs, filled."""
        context, protocol = self._context, self._protocol
        self.release()
        values = _copied_if_overlapping(movement.values, movement.outputs)
        filled = self._filled.get(movement.fingerprint.word, False)
        builder = self.writer.write(movement, values, filled=filled, waits=not movement.view)
        record = self.writer.pack(builder)
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
        index, sources, found = self._protocol.index, movement.sources, {}
        fetched: list[int] = []
        for source in (*sources[index:], *sources[:index]):  # not all of the same at the same time
            found[source] = self._take(movement, values, records[source], source, fetched)
        if fetched:
            self._in_place.confirm(fetched)
        return records, [found[source] for source in sources]

    def _remember_buffers(self, movement: Movement, records: Sequence[ExchangeRecord]) -> None:
        if movement.values:
            index, root = self._protocol.index, movement.root
            readers = (root,) if movement.to_root else range(len(records))
            if len(self._filled) >= MAX_CALLS:
                self._filled.clear()
            self._filled[movement.fingerprint.word] = all(
                records[i].expects for i in readers if i is not None and i != index
            )

    # -- nonblocking -------------------------------------------------------------------------------------

    def prepare(self, movement: Movement) -> PreparedRecord:
        """Return the record of a call, with copies: the caller may change its arrays and objects."""
        self.release()
        copies = [copied(x) for x in movement.values]
        builder = self.writer.write(movement, copies)
        return PreparedRecord(self.writer.pack(builder), builder.keepalive, copies)

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
            raise self._protocol.overlap(*found)

    def _take(
        self,
        movement: Movement,
        values: Sequence[Any],
        record: ExchangeRecord,
        source: int,
        fetched: list[int],
    ) -> Any:
        """Return a source's value; one that was read where it lies is `fetched`, and has to be confirmed."""
        index = self._protocol.index
        output = movement.outputs.get(source)
        if source == index:
            own = values[index if len(values) > 1 else 0]
            array = as_plain_array(own)
            if array is not None:
                return _from_itself(own, array, output, view=movement.view)
        return self.take(record.payload(source, index), source, output, fetched, view=movement.view)

    def take(
        self,
        message: Envelope,
        source: int,
        output: AnyArray | None,
        fetched: list[int],
        *,
        view: bool = False,
    ) -> Any:
        """Return the value of a message from another member, or the `output`, which is filled."""
        if message.kind == PLACE:
            return self._fetch(message, source, output, fetched)
        if output is not None:
            self._packer.fill(output, message)
            self._context.nbytes += output.nbytes
            self._in_place.try_to_read(source, output.nbytes)
            return output
        if message.kind == VIEW:
            if brings_tensor(message):
                return self._packer.unpack(message) if view else self._packer.copy_tensor(message)
            array = self._context.memory.attach_view(message.body)
            self._in_place.try_to_read(source, array.nbytes)
            return _read_only(array) if view else np.array(array, order="C")
        if message.kind == OBJECT:
            message.body = bytes(message.body)
        return self._packer.unpack(message)

    def _fetch(self, message: Envelope, source: int, output: AnyArray | None, fetched: list[int]) -> Any:
        form = self._packer.form(message)
        assert form is not None, "a place is that of an array"
        whole = output is not None and output.flags.c_contiguous
        target = output if output is not None and whole else np.empty(form[1], form[0])
        if is_address(message.body):
            self._in_place.fetch(source, message.body, target)
            fetched.append(source)
        else:
            self._buffer.borrow(bytes(message.body), flat_octets(target))
            self._in_place.try_to_read(source, target.nbytes)
        self._context.nbytes += target.nbytes
        if output is None:
            return tensor_of(target) if brings_tensor(message) else target
        if target is not output:
            np.copyto(output, target)
        return output

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
