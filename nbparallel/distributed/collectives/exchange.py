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
import marshal
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbparallel.distributed.collectives.direct import KeptBuffer, direct_broadcast
from nbparallel.distributed.collectives.in_place import InPlaceReading, address_in
from nbparallel.distributed.collectives.movements import READ_ONLY, Movement, array_label
from nbparallel.distributed.point_to_point.packing import (
    ADOPTED,
    ARRAY,
    NUMBER,
    OBJECT,
    PLACE,
    VIEW,
    Envelope,
    Packer,
    Payload,
    brings_tensor,
)
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime.rank_context import Exposure, RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    Cache,
    SharedSpan,
    as_operand,
    as_plain_array,
    copied,
    decode_handle,
    may_overlap,
    read_only,
)
from nbparallel.distributed.slots.mismatch import overlap
from nbparallel.distributed.slots.slot_area import (
    DIRECT,
    SHARED,
    Fingerprint,
    Span,
    all_offer,
    conflict,
    fingerprint,
    joined,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.sharing.tensors import fill_module, is_module, is_tensor, tensor_of
from nbparallel.wire.control import Operation

# Exchange records: what each rank writes into its slot for a data movement.
#
# A record holds payloads (one for all members, or one for each), the *form* of each payload (dtype and shape,
# or "an object", as one word), the forms of the arrays that its writer fills, and the shared memory that it
# reads or writes.  So every member can check what every other member sends and expects, before any array is
# written::
#
#     length of the head | head | bodies of the payloads
#
# Forms that are all the same are written once: so a member that moves equal arrays need not look at every
# pair of members, whose number is the square of theirs.
#
# A record that is too long for a slot lies in shared memory of its own, and the slot holds its handle.

_LENGTH = struct.Struct("<Q")
OBJECT_FORM = 1
"""The form of a value that is not an array."""
OVERHEAD = 64
"""An upper bound of what a payload takes beside its own bytes."""
NOTHING = Payload(0, b"", b"")
"""Stands for a value that only its own member takes."""
Forms = list[int]
Spans = list[tuple[Span, bool]]


@functools.lru_cache(maxsize=4096)
def form_word(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return dtype and shape as one word: equal for arrays that can be copied into each other."""
    text = repr((dtype.str, str(dtype), shape)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 2


class ExchangeRecord(NamedTuple):
    """A record as its readers see it."""

    waits: bool
    """Whether the writer waits until all members have read its memory."""
    brought: Forms
    """The forms of the payloads: none, one for all takers, or one for each member."""
    expected: Forms
    """Forms of the arrays that the writer fills: one for each member that sends, or one for all."""
    spans: Spans
    """The writer's shared memory that others read, or that it writes, and which of both."""
    payloads: list[tuple[int, bytes, int, int]]
    """Kind and description of each, and where its body begins and ends behind the head."""
    bodies: memoryview
    """Of the payloads."""

    def payload(self, writer: int, reader: int) -> Envelope:
        """Return the payload for a member; its body is a view of the slot."""
        kind, meta, start, stop = self.payloads[reader if len(self.payloads) > 1 else 0]
        return Envelope(writer, 0, kind, 0, 0, meta, self.bodies[start:stop])


def record_of(payloads: Sequence[Payload], forms: Forms, expected: Forms, spans: Spans, waits: bool) -> bytes:
    """Return a record as bytes."""
    places, stop = [], 0
    for payload in payloads:
        start, stop = stop, stop + len(payload.body)
        places.append((payload.kind, payload.meta, start, stop))
    head = marshal.dumps((waits, _once(forms), _once(expected), spans, places))
    return b"".join([_LENGTH.pack(len(head)), head, *(payload.body for payload in payloads)])


def opened(data: memoryview) -> ExchangeRecord | bytes:
    """Return the record that bytes are, or the handle of the memory in which it lies."""
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    found = marshal.loads(data[_LENGTH.size : begin])
    if isinstance(found, bytes):
        return found
    waits, brought, expected, spans, payloads = found
    return ExchangeRecord(waits, brought, expected, spans, payloads, data[begin:])


def _once(forms: Forms) -> Forms:
    """Return the first of forms that are all the same, else all of them."""
    return forms[:1] if len(set(forms)) == 1 else forms


class Exchange:
    """One rank's side of all data movements in a group."""

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        in_place: InPlaceReading,
        buffer: KeptBuffer,
    ) -> None:
        self._context, self._protocol = context, protocol
        self._in_place, self._buffer, self._lent = in_place, buffer, 0
        self._index, self._size = protocol.index, len(protocol.ranks)
        self._filled: Cache[int, bool] = Cache(4096)
        """Whether all takers of the last call filled arrays, by its fingerprint: the next call expects it."""
        self._packer = Packer(context, protocol.payload_nbytes)
        self._held: deque[tuple[int, object]] = deque()

    def __call__(self, movement: Movement, deadline_ns: int | None) -> list[Any]:
        """Move; return what came from each of the sources: new values, or the outputs, filled."""
        context, protocol, index = self._context, self._protocol, self._index
        values = _copied_if_overlapping(movement.values, movement.outputs)
        word = movement.fingerprint.word
        filled = self._filled.get(word, False)
        data, keepalive, waits = self.write(movement, values, filled=filled, waits=not movement.view)
        protocol.deadline_ns = deadline_ns
        protocol.begin(movement.operation, movement.fingerprint, context.call_site.line())
        self.hold(keepalive)
        context.operations += 1
        protocol.put(data)
        if not protocol.arrive_and_wait():
            protocol.compare()
        records, found = self.read(movement, values)
        if movement.values:
            readers = (movement.root,) if movement.to_root else range(self._size)
            fills = all(records[i].expected for i in readers if i is not None and i != index)
            if fills != filled:
                self._filled[word] = fills
        if any(record.waits for record in records):
            # One that failed may be changing what was just copied; others may have ended behind the call.
            context.check_peers([protocol.ranks[i] for i in movement.sources if records[i].waits])
            protocol.announce_done()
            if waits:
                protocol.wait_until_read()
                self.release()
        protocol.release()
        return found

    # -- writing -----------------------------------------------------------------------------------------

    def write(
        self, movement: Movement, values: Sequence[Any], *, filled: bool = False, waits: bool = False
    ) -> tuple[bytes, list[object], bool]:
        """Return the record of a call, what it refers to, and whether the call waits for its readers.

        Parameters
        ----------
        values : sequence
            Those of `movement`, or copies.
        filled : bool
            Whether all takers are expected to fill arrays: a single one that does not keeps a copy.
        waits : bool
            Whether the call can wait until others have read its arrays where they lie.
        """
        self.release()
        self._lent, store, size = 0, self._context.store, self._size
        payloads: list[Payload] = []
        brought: Forms = []
        read: list[AnyArray] = []
        keepalive: list[object] = []
        budget = (self._protocol.payload_nbytes - 8 * size) // max(1, len(values)) - 2 * OVERHEAD
        readers = 1 if len(values) > 1 or movement.to_root or size == 2 else size - 1
        readable = waits and (filled or readers > 1)
        only_here = size == 1 or (movement.to_root and movement.root == self._index)
        takers: Sequence[int] = range(size)
        if movement.to_root and movement.root is not None:
            takers = (movement.root,)
        is_waiting = False
        for i, value in enumerate(values):
            array = as_plain_array(value)
            if (
                array is not None
                and (only_here or (len(values) > 1 and i == self._index))
                and (not movement.view or store.is_shared(array))
            ):
                payload = NOTHING  # no other member takes it
            else:
                mine = (i,) if len(values) > 1 else takers
                offer = functools.partial(self._offer, mine) if readable else None
                payload = self._packer.leave(value, budget, view=movement.view, readers=readers, offer=offer)
            payloads.append(payload)
            brought.append(OBJECT_FORM if array is None else form_word(array.dtype, array.shape))
            is_waiting = is_waiting or payload.kind == PLACE
            if payload.keepalive is not None or movement.view:
                keepalive.append((payload.keepalive, value))
            if array is not None and payload.kind == VIEW and not movement.view:
                read.append(array)
            self._context.nbytes += payload.nbytes
        outputs, written = movement.outputs, [*movement.outputs.values()]
        senders: Sequence[Any] = (movement.root,) if movement.from_root else range(size)
        expected = [form_word(outputs[i].dtype, outputs[i].shape) for i in senders] if outputs else []
        if movement.target is not None:
            written.append(movement.target)
        # Others read the user's own arrays: no member may write them, and this one waits.
        spans = [(span, False) for span in self._spans(read)]
        is_waiting = is_waiting or bool(spans)
        spans += [(span, True) for span in self._spans(written)]
        data = record_of(payloads, brought, expected, spans, is_waiting)
        if len(data) > self._protocol.payload_nbytes:
            memory, handle = self._packer.in_memory(data)
            keepalive.append(memory)
            packed = marshal.dumps(handle)
            data = _LENGTH.pack(len(packed)) + packed
        return data, keepalive, is_waiting

    def _spans(self, arrays: Sequence[AnyArray]) -> list[Span]:
        """Return where arrays lie, those that are shared."""
        if not arrays:
            return []
        places = [self._context.store.location(array) for array in arrays]
        return joined([(place.segment, place.start, place.stop) for place in places if place is not None])

    def leave(self, x: Any) -> Payload:
        """Return a value as a payload of a slot of its own, for all other members."""
        array, self._lent = as_plain_array(x), 0
        used = 2 * OVERHEAD + (0 if array is None else len(self._packer.meta(array)))
        offer = functools.partial(self._offer, range(self._size))
        room = self._protocol.payload_nbytes - used
        return self._packer.leave(x, room, view=False, readers=self._size - 1, offer=offer)

    def _offer(self, takers: Sequence[int], array: AnyArray) -> bytes:
        """Return where takers find an array: in its place, or in this rank's buffer; empty: nowhere."""
        place = self._in_place.offer(array, takers)
        if not place and (place := self._buffer.lend(flat_octets(array), self._lent)):
            self._lent += array.nbytes
        return place

    def hold(self, keepalive: object) -> None:
        """Hold what the record of the collective that has begun refers to, until all have read it."""
        if keepalive:
            self._held.append((self._protocol.number, keepalive))

    def release(self) -> None:
        """Release copies that all members have read."""
        held = self._held
        if held:
            read = self._protocol.all_done()
            while held and held[0][0] <= read:
                held.popleft()

    # -- reading -----------------------------------------------------------------------------------------

    def read(self, movement: Movement, values: Sequence[Any]) -> tuple[list[ExchangeRecord], list[Any]]:
        """Compare all records, and read the values for this member."""
        records = [self._open(i) for i in range(self._size)]
        if any(record.expected for record in records):
            self._check_forms(records, movement)
        spans = [record.spans for record in records]
        if any(writes for mine in spans for _, writes in mine) and (found := conflict(spans)) is not None:
            raise self._protocol.overlap(*found)
        index, sources, taken = self._index, movement.sources, {}
        fetched: list[int] = []
        for source in (*sources[index:], *sources[:index]):  # not all of the same at the same time
            taken[source] = self._take(movement, values, records[source], source, fetched)
        if fetched:
            self._in_place.confirm(fetched)
        return records, [taken[source] for source in sources]

    def _open(self, index: int) -> ExchangeRecord:
        record = opened(self._protocol.get(index))
        if isinstance(record, bytes):
            memory = self._context.attach(decode_handle(record), writable=False)
            record = opened(memory.data)
            assert isinstance(record, ExchangeRecord), "a record in memory of its own is whole"
        return record

    def _check_forms(self, records: Sequence[ExchangeRecord], movement: Movement) -> None:
        senders: Sequence[Any] = (movement.root,) if movement.from_root else range(self._size)
        sent = [records[source].brought for source in senders]
        for_all = _once([forms[0] if len(forms) == 1 else 0 for forms in sent])
        ranks = self._protocol.ranks
        for reader, record in enumerate(records):
            if not record.expected or record.expected == for_all:
                continue
            expected = record.expected * (len(sent) if len(record.expected) == 1 else 1)
            for source, forms, form in zip(senders, sent, expected, strict=True):
                if form != forms[reader if len(forms) > 1 else 0]:
                    what = (
                        f"what rank {ranks[source]} passed to {movement.operation.name} does not fit the "
                        f"array that rank {ranks[reader]} gave to take it"
                    )
                    if movement.operation is Operation.scatter:
                        what += "; only the source passes values, the others pass None or memory for a part"
                    raise self._protocol.mismatch(what)

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
                if view:
                    return self._packer.unpack(message)
                return tensor_of(np.array(self._packer.content(message), order="C"))
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
        if address := address_in(message.body):
            self._in_place.fetch(source, address, target)
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


# broadcast: the root writes its bytes, or their handle, into its slot; all other members copy them out.
#
# If all arrays are large and lie in shared memory, every member copies one slice of the root's array to all
# others.  Else the root leaves what an exchange would: a large private array in its place, in the buffer that
# the root keeps, or as a copy in shared memory.

_PAYLOAD = struct.Struct("<BxHq")
"""Kind, length of the description before the body, and a number for the strides of what is shared."""


@functools.lru_cache(maxsize=4096)
def _object_label(rank: int, kind: str) -> Fingerprint:
    return fingerprint("broadcast", kind or "-", root=rank, content="object" if kind else None)


def _turn(array: AnyArray) -> int:
    """Return a number for the strides of an array: of x.T another one than of x, in the same memory."""
    return hash(tuple([step for step, length in zip(array.strides, array.shape, strict=True) if length > 1]))


class Broadcast:
    """One rank's side of `broadcast`."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, exchange: Exchange, in_place: InPlaceReading
    ) -> None:
        self._context, self._protocol, self._exchange = context, protocol, exchange
        self._in_place = in_place

    def __call__(self, x: Any, root: int) -> Any:
        """Return the value of `root`; an array of this rank is filled."""
        context, protocol = self._context, self._protocol
        mine = protocol.index == root
        array = as_operand(x) if not mine and is_tensor(x) else as_plain_array(x)
        span = None if array is None else context.memory.span_of(array)
        fills = mine or array is None or array.flags.writeable
        if not fills and span is None:
            raise read_only(x, READ_ONLY)
        if len(protocol.ranks) == 1:
            return x
        left = self._exchange.leave(x) if mine else NOTHING
        label = self._fingerprint(x, array, root, mine=mine)
        protocol.begin(Operation.broadcast, label, context.call_site.line())
        if mine:
            context.nbytes += left.nbytes
            turn = 0 if array is None or span is None else _turn(array)
            protocol.put(_PAYLOAD.pack(left.kind, len(left.meta), turn) + left.meta + left.body)
        direct = (
            array is not None and span is not None and span.direct and array.nbytes > protocol.payload_nbytes
        )
        if array is None or span is None or not (direct and fills):
            offers = self._arrive_and_compare(0, span, root)
        else:
            if not mine:
                protocol.put(context.memory.packed(array, span))
            with Exposure(context):
                offers = self._arrive_and_compare(DIRECT, span, root)
                if all_offer(offers, DIRECT):
                    self._copy_directly(array, root)
                    protocol.release()
                    return x
        here = self._with_memory_of(root, offers)
        is_in = protocol.index in here
        is_same = mine or (array is not None and is_in and self._message(root)[1] == _turn(array))
        value = x
        if not is_same:
            value = self._take(x, None if is_in or not fills else array, root)
        if len(here) > 1:
            protocol.synchronize()  # no rank may write to the memory while another one looks at it
        if mine and left.kind not in (ARRAY, NUMBER):
            protocol.wait_until_read()  # until then the other ranks read this rank's memory
        protocol.release()
        if not is_same and not fills:
            raise read_only(x, READ_ONLY)
        if not is_same and is_in:
            raise overlap(Operation.broadcast, protocol.ranks[root], context.rank)
        if value is not x and array is None and is_module(x):
            return fill_module(x, value)  # behind the operation: one that does not fit fails here alone
        return value

    def _with_memory_of(self, root: int, offers: list[int]) -> list[int]:
        """Return the members that passed the root's own shared memory, the root too."""
        spans, generation = self._protocol.spans, self._protocol.generation
        return [
            i for i, offer in enumerate(offers)
            if offer & offers[root] & SHARED and spans.same(generation, i, root)
        ]  # fmt: skip

    def _arrive_and_compare(self, bits: int, span: SharedSpan | None, root: int) -> list[int]:
        """Wait for all members; returns their bits, or raises alike on all."""
        protocol = self._protocol
        bits |= SHARED if span is not None else 0
        if not protocol.arrive_and_wait(bits, span):
            protocol.compare(root=root)
        elif not bits:
            return [0] * len(protocol.ranks)  # every member passed a private array
        offers = protocol.bits()
        if any(offers):
            protocol.check_overlap(offers, root=root)
        return offers

    def _copy_directly(self, array: AnyArray, root: int) -> None:
        """Copy this member's slice of the root's array to all other members' arrays."""
        context, protocol = self._context, self._protocol
        source, targets = array, []
        for i in range(len(protocol.ranks)):
            packed = bytes(protocol.get(i))
            if i == root:
                if i != protocol.index:
                    packed = bytes(self._message(root)[0].body)
                    source = context.memory.attach(packed, writable=False)
            elif not protocol.spans.same(protocol.generation, i, root):
                own = i == protocol.index
                targets.append(array if own else context.memory.attach(packed, writable=True))
        direct_broadcast(context, protocol, flat_octets(source), [flat_octets(x) for x in targets])

    def _fingerprint(self, x: Any, array: AnyArray | None, root: int, *, mine: bool) -> Fingerprint:
        """Return the fingerprint; what is moved is left open by ranks that brought no array."""
        rank = self._protocol.ranks[root]
        if array is not None:
            return array_label("broadcast", "-", array.dtype, array.shape, rank)
        return _object_label(rank, type(x).__name__ if mine else "")

    def _message(self, root: int) -> tuple[Envelope, int]:
        data = self._protocol.get(root)
        kind, length, turn = _PAYLOAD.unpack_from(data)
        meta = data[_PAYLOAD.size :][:length]
        return Envelope(root, 0, kind, 0, 0, bytes(meta), data[_PAYLOAD.size + length :]), turn

    def _take(self, x: Any, array: AnyArray | None, root: int) -> Any:
        """Return the root's value; an array that was passed is filled."""
        protocol, (message, _) = self._protocol, self._message(root)
        fetched: list[int] = []
        value = self._exchange.take(message, root, array, fetched)
        if fetched:
            self._in_place.confirm(fetched)
        elif array is None and message.kind in (ADOPTED, ARRAY, VIEW):
            self._context.nbytes += value.nbytes
        if message.kind not in (ARRAY, NUMBER):
            self._context.check_peers((protocol.ranks[root],))  # which may be changing it already
            protocol.announce_done()
        return value if array is None else x
