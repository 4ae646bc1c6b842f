"""The bytes of a pickled message: a header, the regions of its blob, and the pickle stream.

Buffers of 256 KiB and more (and a stream of that size) are stored once in a segment that every receiver maps
copy-on-write.  If functions inside read globals of the sender, the message contains one message for
the object and one for each of those globals, which a receiver loads only if it lacks the name.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, TypeAlias

import numpy as np

from nbparallel.errors import ProtocolError
from nbparallel.sharing import Store
from nbparallel.wire.name_updates import ArrayHandle

# Blobs: large buffers of a pickled object, written once into a segment, mapped copy-on-write.
#
# A private mapping is no snapshot: pages that this process did not write show later writes of others.  So
# no process writes a blob's segment again, and the store does not reuse it while any process maps it.

ALIGNMENT = 64
"""Bytes; where a buffer starts in a blob: a cache line, and enough for every vector instruction."""


_ZEROS = memoryview(bytes(ALIGNMENT))


class ByValue:
    """The store of messages to another machine: no array is shared, and no buffer leaves the stream."""

    rights_changes = 0

    # docstrings as those of `Store`; what would need memory of this machine is not here, and never called

    def handle(self, x: object, *, broker: Any = None, writable: bool | None = False) -> None:
        return None

    def location(self, x: object) -> None:
        return None

    def packed_read_only(self, x: object) -> None:
        return None


BY_VALUE: Any = ByValue()


class CommonCopies(Protocol):
    """Copies of private arrays that several messages share."""

    def copy(self, array: np.ndarray[Any, Any], store: Store) -> np.ndarray[Any, Any] | None:
        """Return a shared copy of `array` that no process writes to; None: each message has its own."""


def shared_copy(
    array: np.ndarray[Any, Any], store: Store, copies: bool | CommonCopies
) -> tuple[np.ndarray[Any, Any], bool]:
    """Return a shared copy of an array, and whether other messages have it too: map it copy-on-write."""
    common = None if isinstance(copies, bool) else copies.copy(array, store)
    return (store.share(array, for_all=True), False) if common is None else (common, True)


def write_blob(
    parts: Sequence[memoryview], store: Store, *, broker: Any = None
) -> tuple[ArrayHandle, tuple[tuple[int, int], ...], np.ndarray[Any, Any]]:
    """Write `parts` into one new segment.

    Returns
    -------
    handle : ArrayHandle
        Of the whole blob, one-dimensional bytes.
    regions : tuple of (offset, length)
        Of each part, in bytes, relative to the blob.
    owner : ndarray
        Keeps the segment alive; drop it when every receiver has mapped the blob.
    """
    regions, content = [], []
    end = 0
    for part in parts:
        padding = -end % ALIGNMENT
        content += [_ZEROS[:padding], part] if padding else [part]
        regions.append((end + padding, part.nbytes))
        end += padding + part.nbytes
    owner = store.join(content if end else [_ZEROS[:1]])
    handle = store.handle(owner, broker=broker)
    assert handle is not None, "the store's own arrays are shared"
    return handle, tuple(regions), owner


LARGE = 256 * 1024
"""Bytes; a buffer below this is cheaper inside the stream than mapped."""

_HEADER = struct.Struct("<4sBBHI QQQ")
"""magic, version, flags, reserved, number of regions; segment, its bytes, where the blob begins."""
_REGION = struct.Struct("<QQ")
_MAGIC = b"NBPK"
_VERSION = 1
_STREAM_IN_BLOB, _PLAIN, _WITH_GLOBALS = 1, 2, 4
"""Flags: the stream is the blob's first region; the value needs nothing of ours; globals follow."""
PLAIN = _HEADER.pack(_MAGIC, _VERSION, _PLAIN, 0, 0, 0, 0, 0)
"""Header of a value that needs nothing of ours."""
_GLOBALS = _HEADER.pack(_MAGIC, _VERSION, _WITH_GLOBALS, 0, 0, 0, 0, 0)

Globals: TypeAlias = dict[str, bytes | str]
"""Messages by the names of globals; a string is the reason why the value cannot be sent."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object as bytes."""

    data: bytes
    """All that travels."""
    segments: tuple[int, ...]
    """Segments that `data` refers to."""
    copied_nbytes: int
    """Bytes that were copied to make this, blob included."""
    keep: tuple[object, ...]
    """Hold these until every receiver has loaded `data`: what they refer to stays alive as long."""


def pack_message(
    stream: memoryview,
    buffers: Sequence[memoryview],
    store: Store,
    *,
    broker: Any,
    arrays: tuple[np.ndarray[Any, Any], ...],
    segments: tuple[int, ...],
) -> Pickled:
    """Copy the large buffers into a segment and return the message.

    Parameters
    ----------
    stream, buffers : memoryview
        The pickle stream and its out-of-band buffers.
    arrays, segments : tuple
        Shared arrays that the stream refers to by handles, and their segments.
    """
    parts, flags = list(buffers), 0
    if stream.nbytes >= LARGE and store is not BY_VALUE:
        parts.insert(0, stream)
        flags = _STREAM_IN_BLOB
    if not parts:
        data = _HEADER.pack(_MAGIC, _VERSION, 0, 0, 0, 0, 0, 0) + stream
        return Pickled(data, segments, len(data), arrays)
    blob, regions, owner = write_blob(parts, store, broker=broker)
    header = _HEADER.pack(
        _MAGIC, _VERSION, flags, 0, len(regions), blob.segment, blob.segment_nbytes, blob.offset
    )
    data = header + b"".join(_REGION.pack(*region) for region in regions)
    if not flags:
        data += stream
    return Pickled(data, (*segments, blob.segment), len(data) + owner.nbytes, (*arrays, owner))


def parse_message(data: memoryview, store: Store, broker: Any) -> tuple[memoryview, list[memoryview]]:
    """Return the stream of a message and its buffers: writable, private to this process.

    The mapping lives as long as a view of it does.
    """
    if data.nbytes < _HEADER.size:
        raise ProtocolError(f"a pickled message of {data.nbytes} bytes is shorter than its header")
    magic, version, flags, _, count, segment, segment_nbytes, offset = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        raise ProtocolError(f"not a pickled message of version {_VERSION}: {bytes(data[:5])!r}")
    start = _HEADER.size + count * _REGION.size
    if start > data.nbytes:
        raise ProtocolError(f"a pickled message announces {count} regions and ends before them")
    regions = list(_REGION.iter_unpack(data[_HEADER.size : start]))
    if not regions:
        return data[start:], []
    nbytes = max(begin + length for begin, length in regions)
    handle = ArrayHandle(segment, segment_nbytes, offset, (nbytes,), (1,), "|u1", False)
    blob = store.attach(handle, private=True, broker=broker).data
    parts = [blob[begin : begin + length] for begin, length in regions]
    return (parts[0], parts[1:]) if flags & _STREAM_IN_BLOB else (data[start:], parts)


def join_globals(main: Pickled, parts: Mapping[str, Pickled | str], digests: Mapping[str, bytes]) -> Pickled:
    """Return one message of an object's and those of the globals that its functions read.

    `digests` are what values with large buffers are known by: their bytes only say where these are.
    """
    if not parts:
        return main
    whole = [main, *(part for part in parts.values() if isinstance(part, Pickled))]
    bodies = {name: part if isinstance(part, str) else part.data for name, part in parts.items()}
    data = _GLOBALS + pickle.dumps((main.data, bodies, digests), 5)
    return Pickled(
        data,
        tuple(segment for part in whole for segment in part.segments),
        len(data) + sum(part.copied_nbytes - len(part.data) for part in whole),
        tuple(whole),
    )


def split_globals(message: memoryview) -> tuple[memoryview, Globals, Mapping[str, bytes]]:
    """Return an object's message, those of the globals that came with it, and the digests of these."""
    if message[: len(_GLOBALS)] != _GLOBALS:
        return message, {}, {}
    try:
        main, parts, digests = pickle.loads(message[len(_GLOBALS) :])
    except Exception as error:
        raise ProtocolError(f"a message between processes is damaged: {error}") from error
    return memoryview(main), parts, digests


MAX_PLAIN = 4096
"""Characters or bytes; what is longer may have to travel beside the stream."""
_TEXT = frozenset({str, bytes})
_NUMBERS = frozenset({int, float, complex, bool, NoneType}) | {
    kind for kind in np.sctypeDict.values() if issubclass(kind, np.bool_ | np.number)
}


def is_plain(obj: Any) -> bool:
    """Whether nothing in `obj` needs our pickler, and it is small.

    >>> is_plain(np.float32(1.5)), is_plain("x" * 5000), is_plain([1])
    (True, False, False)
    """
    kind = type(obj)
    if kind is int:
        return bool(-(1 << 64) < obj < 1 << 64)
    return kind in _NUMBERS or (kind in _TEXT and len(obj) <= MAX_PLAIN)


# A checksum of large buffers at the speed of memory, to notice that an object changed.
#
# Each block of 64 KiB is multiplied word by word with fixed random odd numbers and summed modulo 2**64: a
# change of any one word always shows (odd numbers are invertible), any other with probability 1 - 2**-64.
# `hashlib` reads 1-2 GB/s, this ten times as much.  It is no protection against an adversary.

_WORDS = 8192
"""Words of 8 bytes in a block: 64 KiB, which stays in the second-level cache beside the weights."""


@functools.cache
def _weights() -> np.ndarray[Any, np.dtype[np.uint64]]:
    # made with the first large buffer: many notebooks never need `numpy.random`, which takes 4 ms to import
    return np.random.default_rng(0x6E6270).integers(0, 2**64, _WORDS, dtype=np.uint64) | np.uint64(1)


def checksum_buffer(buffer: memoryview) -> bytes:
    """Return 16 bytes that change when the buffer's bytes do; `buffer` is contiguous bytes."""
    data = np.frombuffer(buffer, np.uint8)
    blocks = data.nbytes // (_WORDS * 8)
    digest = hashlib.blake2b(data.nbytes.to_bytes(8, "little"), digest_size=16)
    if blocks:
        # a view at any address: numpy copies block by block where the processor wants alignment
        head = data[: blocks * _WORDS * 8].view(np.uint64).reshape(blocks, _WORDS)
        digest.update(np.dot(head, _weights()).tobytes())
    digest.update(data[blocks * _WORDS * 8 :].tobytes())
    return digest.digest()
