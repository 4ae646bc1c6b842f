"""broadcast: the root writes its bytes, or their handle, into its slot; all other members copy them out.

If all arrays are large and lie in shared memory, every member copies one slice of the root's array to all
others.  A large private one is read where it lies, if all others can (`in_place`), else it is copied piece by
piece through the root's buffer in shared memory.
"""

from __future__ import annotations

import functools
import pickle
import struct
from typing import Any

import numpy as np

from nbparallel.distributed.collectives.direct import KeptBuffer, direct_broadcast
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.point_to_point import packing
from nbparallel.distributed.point_to_point.streaming import flat_octets
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    SharedSpan,
    as_operand,
    as_plain_array,
    decode_handle,
    encode_handle,
    read_only,
)
from nbparallel.distributed.slots.fingerprint import (
    DIRECT,
    SHARED,
    Fingerprint,
    Route,
    choose_route,
    fingerprint,
)
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.errors import InternalError
from nbparallel.sharing.tensors import fill_module, is_module, is_tensor, shown_dtype, tensor_of
from nbparallel.wire.control import Operation
from nbparallel.wire.handles import ArrayHandle

_HEAD = struct.Struct("<B?xxI")
"""What the root left, whether it brought a tensor, and the length of the pickled (dtype, shape) before it."""
_INLINE, _SHARED, _COPIED, _OBJECT, _BLOB, _PLACE = range(1, 7)
READ_ONLY = (
    "broadcast fills this array on all ranks but the source, and it is read-only: pass `x.copy()`, which is "
    "filled and returned, or None there to get a new one"
)


@functools.lru_cache(maxsize=4096)
def _array_label(rank: int, dtype: Any, shape: tuple[int, ...]) -> Fingerprint:
    content = (dtype.str, str(dtype), shape)
    return fingerprint("broadcast", shown_dtype(dtype), str(shape), root=rank, content=content)


@functools.lru_cache(maxsize=4096)
def _object_label(rank: int, kind: str) -> Fingerprint:
    return fingerprint("broadcast", kind or "-", root=rank, content="object" if kind else None)


class Broadcast:
    """One rank's side of `broadcast`."""

    def __init__(
        self, context: RankContext, protocol: SlotProtocol, buffer: KeptBuffer, in_place: InPlaceReading
    ) -> None:
        self._context, self._protocol, self._buffer = context, protocol, buffer
        self._in_place = in_place

    def __call__(self, x: Any, root: int) -> Any:
        """Return the value of `root`; an array of this rank is filled."""
        context, protocol = self._context, self._protocol
        mine = protocol.index == root
        array = as_operand(x) if not mine and is_tensor(x) else as_plain_array(x)
        span = None if array is None else context.memory.span_of(array)
        if array is not None and not mine and not array.flags.writeable:
            return self._into_read_only(x, array, span, root)
        if len(protocol.ranks) == 1:
            return x
        pickled = packing.dumps(x, context.store) if mine and array is None else (b"", None)
        protocol.begin(
            Operation.broadcast, self._fingerprint(x, array, root, mine=mine), context.call_site.line()
        )
        source = np.ascontiguousarray(array) if mine and array is not None else None
        left, keepalive = 0, None
        if array is not None and source is not None:
            left = self._leave_array(array, source, span is not None, array is not x and is_tensor(x))
        elif mine:
            left, keepalive = self._leave_object(*pickled)
        direct = (
            array is not None and span is not None and span.direct and array.nbytes > protocol.payload_nbytes
        )
        if array is None or span is None or not direct:
            self._arrive_and_compare(0, span, root)
        else:
            if not mine:
                protocol.put(context.memory.packed(array, span))
            with context.exposing():
                offers = self._arrive_and_compare(DIRECT, span, root)
                if choose_route(offers, fits=False) is Route.DIRECT:
                    self._copy_directly(array, root)
                    protocol.release()
                    return x
        value = x
        if not mine:
            value = self._take(x, array, root)
        elif source is not None and left == _COPIED:
            self._buffer.broadcast(protocol, flat_octets(source), root, b"")
        elif left in (_SHARED, _BLOB, _OBJECT, _PLACE):
            protocol.wait_until_read()  # until then the other ranks read this rank's memory
        del keepalive
        protocol.release()
        if value is not x and array is None and is_module(x):
            return fill_module(x, value)  # behind the operation: one that does not fit fails here alone
        return value

    def _into_read_only(self, x: Any, array: AnyArray, span: SharedSpan | None, root: int) -> Any:
        """Return a read-only array that was passed, if it is the root's own memory: nothing is written."""
        protocol = self._protocol
        if span is None:
            raise read_only(x, READ_ONLY)
        line = self._context.call_site.line()
        protocol.begin(Operation.broadcast, self._fingerprint(x, array, root, mine=False), line)
        offers = self._arrive_and_compare(0, span, root)
        same = bool(offers[root] & SHARED) and self._is_of_root(array, root)
        if not same:
            self._take(None, None, root)  # the other ranks continue
        protocol.release()
        if not same:
            raise read_only(x, READ_ONLY)
        return x

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
                    packed = packed[_HEAD.size + _HEAD.unpack_from(packed)[2] :]
                    source = context.memory.attach(packed, writable=False)
            elif not protocol.spans.same(protocol.generation, i, root):
                own = i == protocol.index
                targets.append(array if own else context.memory.attach(packed, writable=True))
        direct_broadcast(context, protocol, flat_octets(source), [flat_octets(x) for x in targets])

    def _fingerprint(self, x: Any, array: AnyArray | None, root: int, *, mine: bool) -> Fingerprint:
        """Return the fingerprint; what is moved is left open by ranks that brought no array."""
        rank = self._protocol.ranks[root]
        if array is not None:
            return _array_label(rank, array.dtype, array.shape)
        return _object_label(rank, type(x).__name__ if mine else "")

    # -- the root's side -------------------------------------------------------------------------------

    def _leave_array(self, array: AnyArray, source: AnyArray, shared: bool, tensor: bool) -> int:
        context, protocol = self._context, self._protocol
        context.nbytes += array.nbytes
        meta = pickle.dumps((array.dtype, array.shape), 5)
        room = protocol.payload_nbytes - _HEAD.size - len(meta)
        if array.nbytes <= room:
            kind, body = _INLINE, source.tobytes()
        elif shared and (handle := context.store.handle(array, writable=False)) is not None:
            kind, body = _SHARED, encode_handle(handle)
        elif body := self._in_place.offer_to(range(len(protocol.ranks)), source):
            kind = _PLACE
        else:
            kind, body = _COPIED, self._buffer.offer(flat_octets(source))
        protocol.put(_HEAD.pack(kind, tensor, len(meta)) + meta + body)
        return kind

    def _leave_object(self, data: bytes, keep: object) -> tuple[int, object]:
        protocol, store = self._protocol, self._context.store
        self._context.nbytes += len(data)
        if len(data) + _HEAD.size <= protocol.payload_nbytes:
            protocol.put(_HEAD.pack(_OBJECT, False, 0) + data)
            return _OBJECT, keep
        blob = store.empty((len(data),), np.uint8)
        blob[...] = np.frombuffer(data, np.uint8)
        handle = store.handle(blob, writable=False)
        if handle is None:
            raise InternalError("the store's own array is not shared")
        protocol.put(_HEAD.pack(_BLOB, False, 0) + encode_handle(handle))
        return _BLOB, (blob, keep)

    # -- the other ranks' ------------------------------------------------------------------------------

    def _is_of_root(self, array: AnyArray, root: int) -> bool:
        """Whether a shared array is the root's: the same elements in the same memory."""
        if not self._protocol.spans.same(self._protocol.generation, self._protocol.index, root):
            return False
        payload = self._protocol.get(root)
        kind, _, length = _HEAD.unpack_from(payload)
        body = bytes(payload[_HEAD.size + length :])
        if kind == _INLINE:
            return body[: array.nbytes] == array.tobytes()
        return kind == _SHARED and self._is_laid_out_as(array, decode_handle(body))

    def _is_laid_out_as(self, array: AnyArray, other: ArrayHandle) -> bool:
        own = self._context.store.handle(array, writable=False)
        return own is not None and (own.offset, own.strides) == (other.offset, other.strides)

    def _take(self, x: Any, array: AnyArray | None, root: int) -> Any:
        context, protocol = self._context, self._protocol
        payload = protocol.get(root)
        kind, tensor, length = _HEAD.unpack_from(payload)
        body = payload[_HEAD.size + length :]
        if kind == _OBJECT:
            return packing.loads(bytes(body), context.store)
        if kind == _BLOB:
            blob = context.attach(decode_handle(bytes(body)), writable=False)
            return packing.loads(blob.tobytes(), context.store)
        result = x
        if array is None:
            dtype, shape = pickle.loads(payload[_HEAD.size : _HEAD.size + length])
            array = np.empty(shape, dtype)
            result = tensor_of(array) if tensor else array
        context.nbytes += array.nbytes
        if kind == _INLINE:
            array[...] = np.frombuffer(body, array.dtype, array.size).reshape(array.shape)
        elif kind == _SHARED:
            self._copy_shared(array, bytes(body))
        else:
            target = array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)
            if kind == _PLACE:
                self._in_place.fetch(root, body, target)
                self._in_place.confirm((root,))
                protocol.announce_done()
            else:
                self._in_place.try_to_read(root, array.nbytes)
                self._buffer.broadcast(protocol, flat_octets(target), root, bytes(body))
            if target is not array:
                array[...] = target
        return result

    def _copy_shared(self, array: AnyArray, packed: bytes) -> None:
        context = self._context
        span = context.memory.span_of(array)
        other = decode_handle(packed)
        if span is not None and span.segment == other.segment and self._is_laid_out_as(array, other):
            return  # the same memory
        # Attached as it lies: the root's strides may differ from this array's.
        np.copyto(array, context.memory.attach_view(packed))
        # A root that has failed may be changing it already.
        context.check_peers(self._protocol.peers)
