"""Objects on their way to another process: cloudpickle, with shared arrays by handle.

A message is self-contained bytes: a header, the regions of its blob, and the pickle stream.  Buffers of
256 KiB and more (and a stream of that size) lie once in a segment that every receiver maps copy-on-write
(`blobs`); plain arrays in shared memory travel as handles wherever they sit.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cached_property, partial
from typing import Any

import numpy as np
from cloudpickle import cloudpickle

from nbparallel.errors import NbParallelError, ProtocolError, UnpicklableError
from nbparallel.transfer import definitions
from nbparallel.transfer.blobs import ArrayStore, map_blob, write_blob
from nbparallel.transfer.checksum import checksum_buffer
from nbparallel.transfer.code_names import function_names
from nbparallel.transfer.plain import is_plain
from nbparallel.transfer.unpicklable import explain
from nbparallel.wire.handles import ArrayHandle

LARGE = 256 * 1024
"""Bytes; a buffer below this is cheaper inside the stream than mapped."""

_HEADER = struct.Struct("<4sBBHI QQQ")
"""magic, version, flags, reserved, number of regions; segment, its bytes, where the blob begins."""
_REGION = struct.Struct("<QQ")
_MAGIC = b"NBPK"
_VERSION = 1
_STREAM_IN_BLOB = 1
"""Flag: the stream is the blob's first region."""
_PLAIN = _HEADER.pack(_MAGIC, _VERSION, 2, 0, 0, 0, 0, 0)
"""Header of a value that needs nothing of ours."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object as bytes."""

    data: bytes
    """All that travels."""
    segments: tuple[int, ...]
    """Segments that `data` refers to."""
    copied_nbytes: int
    """Bytes that were copied to make this, blob included."""
    shared_nbytes: int
    """Bytes of shared arrays that travel as handles."""
    keep: tuple[object, ...]
    """Hold these until every receiver has loaded `data`: what they refer to stays alive as long."""


class Serialised:
    """A pickled object whose large buffers are still the object's own memory: nothing is copied yet."""

    def __init__(self, stream: memoryview, buffers: list[memoryview], pickler: _Pickler) -> None:
        self.stream, self.buffers = stream, buffers
        self.arrays, self.segments = tuple(pickler.arrays), tuple(pickler.segments)
        self.classes = tuple(pickler.classes.values())
        """Classes of the notebook that the object refers to (only if they travel apart)."""
        self.global_names = frozenset(pickler.global_names)
        """Names of the notebook that the functions inside read."""
        self.assigned = frozenset(pickler.assigned)
        """Names of the notebook that they bind (``global``)."""
        self.mentioned = frozenset(pickler.mentioned)
        """Every name and attribute in those functions."""
        self.files = frozenset(pickler.files)
        """Files that those functions were compiled from, as their code names them."""

    def checksum(self) -> bytes:
        """Return what changes when the object does."""
        digest = hashlib.blake2b(self.stream, digest_size=16)
        for buffer in self.buffers:
            digest.update(checksum_buffer(buffer))
        return digest.digest()

    def pack(self, store: ArrayStore, *, broker: Any = None) -> Pickled:
        """Copy the large buffers into a segment and return the message."""
        parts, flags = list(self.buffers), 0
        if self.stream.nbytes >= LARGE:
            parts.insert(0, self.stream)
            flags = _STREAM_IN_BLOB
        shared = sum(array.nbytes for array in self.arrays)
        if not parts:
            data = _HEADER.pack(_MAGIC, _VERSION, 0, 0, 0, 0, 0, 0) + self.stream
            return Pickled(data, self.segments, len(data), shared, self.arrays)
        blob, regions, owner = write_blob(parts, store, broker=broker)
        header = _HEADER.pack(
            _MAGIC, _VERSION, flags, 0, len(regions), blob.segment, blob.segment_nbytes, blob.offset
        )
        data = header + b"".join(_REGION.pack(*region) for region in regions)
        if not flags:
            data += self.stream
        segments = (*self.segments, blob.segment)
        return Pickled(data, segments, len(data) + owner.nbytes, shared, (*self.arrays, owner))


def _take_buffer(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    # no method: a pickler that refers to itself would keep the arrays alive until the garbage collector runs
    raw = buffer.raw()
    if raw.nbytes < LARGE:
        return True  # inside the stream
    buffers.append(raw)
    return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with our ways for shared arrays and for what the notebook defines."""

    def __init__(
        self, file: io.BytesIO, store: ArrayStore, broker: Any, home: Any, *, apart: bool, target: type | None
    ) -> None:
        self.buffers: list[memoryview] = []
        super().__init__(file, protocol=5, buffer_callback=partial(_take_buffer, self.buffers))
        self.store, self.broker, self.home, self.apart, self.target = store, broker, home, apart, target
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.segments: dict[int, None] = {}
        self.cells: dict[int, definitions.CellReference] = {}
        self.classes: dict[str, type] = {}
        self.global_names: set[str] = set()
        self.assigned: set[str] = set()
        self.mentioned: set[str] = set()
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return self._reduce_array(obj)
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if kind is _lru_cache_wrapper and getattr(obj, "__module__", None) == "__main__":
            return definitions.reduce_cached(obj)
        if kind is cached_property:
            return definitions.reduce_cached_property(obj)
        return definitions.SENTINELS.get(id(obj), NotImplemented)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject:
            return NotImplemented
        handle = self.store.handle(array, broker=self.broker, writable=None)
        if handle is not None:
            self.arrays.append(array)
            self.segments[handle.segment] = None
            return definitions.attach, (tuple(handle),)
        if array.nbytes >= LARGE and not (array.flags.c_contiguous or array.flags.f_contiguous):
            # numpy would copy it into the stream; a contiguous copy goes out of band
            return np.ascontiguousarray(array).__reduce_ex__(5)
        return NotImplemented

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if cloudpickle._should_pickle_by_reference(function):
            return NotImplemented
        if definitions.is_dispatcher(function):
            return definitions.reduce_dispatcher(function)
        module = definitions.module_of(function.__globals__)
        if module is not None:
            return definitions.reduce_function(function, module, self.cells)
        if not definitions.is_home(function.__globals__, self.home):
            return self._dynamic_function_reduce(function)
        names = function_names(function.__code__)
        self.global_names |= names.reads | names.doubtful
        self.assigned |= names.stores
        self.mentioned |= names.mentioned
        self.files.add(function.__code__.co_filename)
        return definitions.reduce_function(function, None, self.cells)

    def _reduce_class(self, cls: type) -> Any:
        if not definitions.by_value(cls):
            return cloudpickle._class_reduce(cls)
        identifier = definitions.tracker(cls)
        self.classes[identifier] = cls
        if self.apart:
            return definitions.class_reference, (identifier, cls.__name__)
        return definitions.reduce_class(cls, redefine=cls is self.target)


class _Unpickler(pickle.Unpickler):
    """Resolves our placeholders; `resolved` must not refer to it, see `_take_buffer`."""

    def __init__(
        self, file: io.BytesIO, buffers: list[memoryview], resolved: dict[str, Any], home: dict[str, Any]
    ) -> None:
        super().__init__(file, buffers=buffers)
        self.resolved, self.home = resolved, home

    def find_class(self, module: str, name: str) -> Any:
        if module == definitions.__name__ and name in self.resolved:
            return self.resolved[name]
        if module == "__main__" and name.partition(".")[0] in self.home:
            found = self.home[name.partition(".")[0]]
            for attribute in name.split(".")[1:]:
                found = getattr(found, attribute)
            return found
        return super().find_class(module, name)


def _resolved(store: ArrayStore, broker: Any, home: dict[str, Any], *, twins: bool) -> dict[str, Any]:
    """Return what stands behind the placeholders of `definitions` in this process."""

    def attach(fields: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        handle = ArrayHandle(*fields)
        return store.attach(handle, writable=handle.writable, broker=broker)

    return {
        "attach": attach,
        "rebuild_function": partial(definitions.make_function, home),
        "rebuild_class": partial(definitions.make_class, home if twins else {}),
        "set_class_state": definitions.complete_class,
        "class_reference": definitions.find_class,
    }


def serialise(
    obj: Any,
    store: ArrayStore,
    *,
    broker: Any = None,
    home: Mapping[str, Any] | None = None,
    name: str | None = None,
    apart: bool = False,
    target: type | None = None,
) -> Serialised:
    """Pickle `obj` without copying its large buffers; see `dumps` for what is common.

    Parameters
    ----------
    apart : bool
        Classes of the notebook travel apart: the stream only refers to them, `Serialised.classes` lists them.
    target : type, optional
        `obj` is this class: the receiver takes its state even if it knows the class already.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, store, broker, home, apart=apart, target=target)
    try:
        pickler.dump(obj)
    except (NbParallelError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        attempt = _attempt(store, broker, home)
        raise UnpicklableError(explain(obj, error, name=name, attempt=attempt)) from error
    return Serialised(file.getbuffer(), pickler.buffers, pickler)


def _attempt(store: ArrayStore, broker: Any, home: Any) -> Any:
    def attempt(part: Any) -> BaseException | None:
        try:
            _Pickler(io.BytesIO(), store, broker, home, apart=False, target=None).dump(part)
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the object's own code raises
            return error
        return None

    return attempt


def dumps(
    obj: Any,
    store: ArrayStore,
    *,
    broker: Any = None,
    home: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Pickled:
    """Turn any object into bytes for another process.

    Parameters
    ----------
    store : ArrayStore
        Where shared arrays are known, and where large buffers go.
    broker : SegmentBroker, optional
        Who hands the segments to the receiver; None: the receiver is this process.
    home : mapping, optional
        The notebook's (or the rank's) namespace: functions that have it as their globals get the
        receiver's instead.  None: that of this process if it has one (a rank has, see
        `definitions.set_home`), else functions take the globals they use with them, as in cloudpickle.
    name : str, optional
        What the user calls the object; errors say it.

    Returns
    -------
    Pickled
        Hold it until the receiver has loaded it.

    Raises
    ------
    UnpicklableError
        Something inside cannot travel: the message says what and where.  Nothing was made.
    """
    if is_plain(obj):
        data = _PLAIN + pickle.dumps(obj, 5)
        return Pickled(data, (), len(data), 0, ())
    if home is None:
        home = definitions.current_home()
    return serialise(obj, store, broker=broker, home=home, name=name).pack(store, broker=broker)


def loads(
    data: bytes | memoryview,
    store: ArrayStore,
    *,
    broker: Any = None,
    home: dict[str, Any] | None = None,
    name: str | None = None,
    twins: bool = True,
) -> Any:
    """Rebuild the object that `dumps` turned into `data`.

    Its large buffers are this process's own (copy-on-write); shared arrays inside are the same memory,
    with the rights they were sent with.  Only load what comes from a process of this session.

    Parameters
    ----------
    home : dict, optional
        Globals of the notebook's functions inside.  None: this process's home, or ``__main__``'s.
    twins : bool
        A class that `home` has from the same source is taken instead of a new one: ranks that ran the same
        cell understand each other's instances.

    Raises
    ------
    UnpicklableError
        The object's own code raised while it was rebuilt; that is the cause.
    ProtocolError
        The bytes are no message.
    """
    message = memoryview(data)
    plain = message[: _HEADER.size] == _PLAIN
    stream, buffers = (message[_HEADER.size :], []) if plain else _parse(message, store, broker)
    if home is None:
        home = definitions.current_home()
    if home is None:
        home = __import__("__main__").__dict__
    try:
        if plain:
            return pickle.loads(stream)
        resolved = _resolved(store, broker, home, twins=twins)
        return _Unpickler(io.BytesIO(stream), buffers, resolved, home).load()
    except (NbParallelError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        what = "an object" if name is None else f"variable {name!r}"
        text = f"{what} could not be rebuilt in this process: {type(error).__name__}: {error}"
        raise UnpicklableError(f"{text}; see the cause for the line that raised") from error


def _parse(data: memoryview, store: ArrayStore, broker: Any) -> tuple[memoryview, list[memoryview]]:
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
    blob = map_blob(handle, store, broker=broker)
    parts = [blob[begin : begin + length] for begin, length in regions]
    return (parts[0], parts[1:]) if flags & _STREAM_IN_BLOB else (data[start:], parts)
