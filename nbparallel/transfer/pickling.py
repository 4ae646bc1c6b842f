"""Pickling of objects for another process: cloudpickle, with shared arrays by handle.

Functions and classes that are defined in the notebook or on a rank are rebuilt over the receiver's namespace
(`definitions`); plain arrays in shared memory travel as handles wherever they sit.  `pickle_format` describes
the bytes.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import time
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import _lru_cache_wrapper, cached_property, partial
from typing import Any

import numpy as np
from cloudpickle import cloudpickle

from nbparallel.errors import NbParallelError, UnpicklableError, with_article
from nbparallel.sharing import Store
from nbparallel.sharing.memory.mapping import VIEWS, Files, FileView, view_of_file
from nbparallel.transfer import cell_sources, definitions
from nbparallel.transfer.code_names import function_names
from nbparallel.transfer.pickle_format import (
    BY_VALUE,
    LARGE,
    PLAIN,
    CommonCopies,
    Globals,
    Pickled,
    checksum_buffer,
    is_plain,
    join_globals,
    pack_message,
    parse_message,
    shared_copy,
    split_globals,
)
from nbparallel.transfer.tensor_pickling import Ties, find_reducers
from nbparallel.transfer.unpickling import own_globals, unpickle
from nbparallel.wire.name_updates import ArrayHandle

# Error messages for objects that cannot be pickled: which part, and what to do.

_BUDGET = 0.5
"""Seconds that the search may take: a user waits for an error message."""
_OWN_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
"""By which a class says how it is pickled, or that it is not."""
_DEPTH = 8
"""Levels that the search descends; deeper ones are reported as their ancestor."""
_OF_TASK = " of a task"
"""Ends what `name_part` calls an argument."""


def explain(
    obj: Any, error: BaseException, *, name: str | None, attempt: Callable[[Any], BaseException | None]
) -> str:
    """Return the message for an object whose pickling raised an error.

    `name` is the user's: of a variable, or words that end with `_OF_TASK`; `attempt` pickles one part, and
    returns what that raised, or None.
    """
    of_task = name is not None and name.endswith(_OF_TASK)
    path, culprit, reason = (name or "it").removesuffix(_OF_TASK), obj, error
    if not _is_recursion(error) and repr(type(obj)) not in str(error):  # else it is the culprit
        path, culprit, reason = _search(obj, error, path, attempt)
    variable = f"an object of type {_type_name(obj)}" if name is None else f"variable {name!r}"
    subject = name if of_task else variable
    where = "it" if culprit is obj else f"{path}, which"
    text = f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__
    return (
        f"{subject} cannot be sent to another process: {where} is {with_article(_type_name(culprit))} "
        f"({text}); {_advice(culprit, reason, name, inside=culprit is not obj)}"
    )


def _advice(culprit: Any, reason: BaseException, name: str | None, *, inside: bool) -> str:
    if _is_recursion(reason):
        return "it is nested too deeply: flatten it"
    what, where = (repr(name), "inside the cell") if name else ("'it'", "where it is used")
    if name and name.endswith(_OF_TASK):
        what, where = name.removesuffix(_OF_TASK), "in the task"
    if isinstance(culprit, types.GeneratorType):
        return f"turn the generator into a list, or create it {where}"
    return f"create it {where}" + f", or leave it out of {what} (a __getstate__ can)" * inside


def _is_recursion(error: BaseException) -> bool:
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _type_name(obj: Any) -> str:
    cls = type(obj)
    module = getattr(cls, "__module__", "builtins")
    return cls.__qualname__ if module in ("builtins", "__main__") else f"{module}.{cls.__qualname__}"


def _search(
    obj: Any, error: BaseException, path: str, attempt: Callable[[Any], BaseException | None]
) -> tuple[str, Any, BaseException]:
    deadline = time.monotonic() + _BUDGET
    seen = {id(obj)}
    for _ in range(_DEPTH):
        if _refuses(obj, error):
            break
        for label, part in _parts(obj):
            if time.monotonic() > deadline:
                return path, obj, error
            if id(part) in seen or isinstance(part, int | float | str | bytes | None):
                continue
            failed = attempt(part)
            if failed is not None:
                seen.add(id(part))
                path, obj, error = path + label, part, failed
                break
        else:
            break
    return path, obj, error


def _refuses(obj: Any, error: BaseException) -> bool:
    """Whether the object's own method raised the error: then its text is the reason, and no part of it."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        own = code.co_name in _OWN_METHODS and code.co_argcount
        if own and trace.tb_frame.f_locals.get(code.co_varnames[0]) is obj:
            return True
        trace = trace.tb_next
    return False


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `obj` holds, with how a user would write it."""
    if isinstance(obj, dict):
        for key, value in list(obj.items()):
            yield f"[{_short(key)}]", value
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        for variable, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            try:
                yield f" with {variable}", cell.cell_contents
            except ValueError:
                continue
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict | types.MappingProxyType) and not isinstance(obj, types.ModuleType):
        for attribute, value in list(attributes.items()):
            yield f".{attribute}", value


def _short(value: Any) -> str:
    plain = isinstance(value, str | int | float | bytes | None)
    text = repr(value) if plain else f"<{type(value).__name__}>"
    return text if len(text) <= 40 else text[:37] + "..."


class Serialised:
    """A pickled object whose large buffers are still the object's own memory: nothing is copied yet."""

    def __init__(self) -> None:
        self.stream = memoryview(b"")
        self.buffers: list[memoryview] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.segments: dict[int, None] = {}
        self.classes: dict[str, type] = {}
        """Classes of the notebook that the object refers to, by their trackers."""
        self.global_names: set[str] = set()
        """Names of the notebook that the functions inside read."""
        self.assigned: set[str] = set()
        """Names of the notebook that they bind (``global``)."""
        self.mentioned: set[str] = set()
        self.words: set[str] = set()
        """Every name and attribute in those functions, and every word in their strings."""
        self.files: set[str] = set()
        self.tensors: list[Any] = []
        """Tensors inside, as the stream numbers them."""

    def checksum(self, most: int = sys.maxsize) -> bytes:
        """Return what changes when the object does; of buffers beyond `most` bytes only the size counts."""
        digest = hashlib.blake2b(self.stream, digest_size=16)
        for buffer in self.buffers:
            most -= buffer.nbytes
            digest.update(checksum_buffer(buffer) if most >= 0 else buffer.nbytes.to_bytes(8, "little"))
        return digest.digest()

    def pack(self, store: Store, *, broker: Any = None) -> Pickled:
        """Copy the large buffers into a segment and return the message."""
        return pack_message(
            self.with_sources(),
            self.buffers,
            store,
            broker=broker,
            arrays=tuple(self.arrays),
            segments=tuple(self.segments),
        )

    def with_sources(self) -> memoryview:
        """Return the stream for `unpickling.unpickle`, behind the cells that functions inside come from."""
        return cell_sources.put_before(self.stream, self.files) if self.files else self.stream


def _take_buffer(buffers: list[memoryview], store: Store, buffer: pickle.PickleBuffer) -> bool:
    # no method: a pickler that refers to itself would keep the arrays alive until the garbage collector runs
    raw = buffer.raw()
    if raw.nbytes < LARGE or store is BY_VALUE:
        return True  # inside the stream
    buffers.append(raw)
    return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with our ways for shared arrays and for what the notebook defines."""

    def __init__(
        self,
        store: Store,
        broker: Any,
        main_globals: Any,
        *,
        file: io.BytesIO | None = None,
        apart: bool = False,
        target: type | None = None,
        reducers: MutableMapping[type, Any] | None = None,
        share_large: bool | CommonCopies = False,
        files: Files | None = None,
    ) -> None:
        self.made, self._file = Serialised(), file or io.BytesIO()
        self.share_large, self.as_library = share_large, reducers is not None
        if reducers is not None:  # before __init__, which reads it
            self.dispatch_table = ChainMap(reducers, self.dispatch_table)  # type: ignore[has-type]
        take = partial(_take_buffer, self.made.buffers, store)
        super().__init__(self._file, protocol=5, buffer_callback=take)
        self.store, self.broker, self.main_globals = store, broker, main_globals
        self.apart, self.target = apart, target
        here = self.as_library or (broker is not None and store is not BY_VALUE)
        self.map_files = files if here else None
        self.cells: dict[int, definitions.CellReference] = {}
        self.tensors = self.made.tensors
        self.reducers = find_reducers()

    def run(self, obj: Any) -> BaseException | None:
        """Pickle an object, once; return whatever its own code raised."""
        try:
            self.dump(obj)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return error
        # getvalue copies nothing; a file with an exported buffer cannot be closed when its cycle ends (3.13)
        self.made.stream = memoryview(self._file.getvalue())
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            return self._reduce_array(obj)
        if kind in VIEWS and (reduced := self._reduce_file_view(obj)) is not None:
            return reduced
        if self.reducers is not None and (reduce := self.reducers.by_class.get(kind)) is not None:
            return reduce(self, obj)
        if kind is types.FunctionType:
            return self._reduce_function(obj)
        if issubclass(kind, type):
            return self._reduce_class(obj)
        if issubclass(kind, BaseException):
            return definitions.reduce_exception(obj)
        if (form := definitions.reduce_typing(obj)) is not NotImplemented:
            return form
        if kind is types.CodeType:
            self.made.files.add(obj.co_filename)
            # with the name of the file, by which lines are shown: cloudpickle 3.1.3 leaves it out
            return definitions.rebuild_code, (obj.co_filename, cloudpickle._code_reduce(obj)[1])
        if kind is _lru_cache_wrapper and getattr(obj, "__module__", None) == "__main__":
            return definitions.reduce_cached(obj)
        if kind is cached_property:
            return definitions.reduce_cached_property(obj)
        if id(obj) in definitions.SENTINELS:
            return definitions.SENTINELS[id(obj)]
        return NotImplemented if self.reducers is None else self.reducers.reduce(self, obj)

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.hasobject:
            return NotImplemented
        handle = self.store.handle(array, broker=self.broker, writable=None)
        if handle is not None:
            return self.attach(array, handle, definitions.attach)
        if array.base is not None and (reduced := self._reduce_file_view(array)) is not None:
            return reduced
        if self.share_large and array.nbytes >= LARGE:
            copy, private = shared_copy(array, self.store, self.share_large)
            handle = self.store.handle(copy, broker=self.broker, writable=True)
            if handle is not None:
                return self.attach(
                    copy, handle, definitions.attach_private if private else definitions.attach
                )
        if array.nbytes >= LARGE and not (array.flags.c_contiguous or array.flags.f_contiguous):
            # numpy would copy it into the stream; a contiguous copy goes out of band
            return np.ascontiguousarray(array).__reduce_ex__(5)
        if self.as_library and not array.flags.writeable:
            return array.copy(order="K").__reduce_ex__(5)  # the library's protocol 4 has no flag
        return NotImplemented

    def _reduce_file_view(self, array: np.ndarray[Any, Any]) -> Any:
        """Return what a `numpy.memmap`, or a view of one, is mapped again by; None: it is to be copied."""
        view = self.map_files and view_of_file(array, self.map_files)
        return view and (FileView.open, (view,))

    def attach(self, array: np.ndarray[Any, Any], handle: ArrayHandle, rebuild: Any) -> Any:
        """Return what a shared array, or what lies over it, is rebuilt from."""
        self.made.arrays.append(array)
        self.made.segments[handle.segment] = None
        return rebuild, (tuple(handle),)

    def _reduce_function(self, function: types.FunctionType) -> Any:
        if cloudpickle._should_pickle_by_reference(function):
            return NotImplemented
        if function.__code__ is definitions.DISPATCHER:
            return definitions.reduce_dispatcher(function)
        module, code = definitions.module_of(function.__globals__), function.__code__
        if module is not None:
            return definitions.reduce_function(function, module, self.cells, function_names(code))
        if not definitions.is_main_globals(function.__globals__, self.main_globals):
            return self._dynamic_function_reduce(definitions.without_annotations(function))
        names = function_names(code)
        self.made.global_names |= names.reads | names.doubtful
        self.made.assigned |= names.stores
        self.made.mentioned |= names.mentioned
        self.made.words |= names.words
        return definitions.reduce_function(function, None, self.cells, names)

    def _reduce_class(self, cls: type) -> Any:
        if not definitions.by_value(cls):
            return cloudpickle._class_reduce(cls)
        identifier = definitions.tracker(cls)
        self.made.classes[identifier] = cls
        if self.apart:
            return definitions.class_reference, (identifier, cls.__name__)
        return definitions.reduce_class(cls, redefine=cls is self.target)


def serialise(
    obj: Any,
    store: Store,
    *,
    broker: Any = None,
    main_globals: Mapping[str, Any] | None = None,
    name: str | None = None,
    apart: bool = False,
    target: type | None = None,
    reducers: MutableMapping[type, Any] | None = None,
    share_large: bool | CommonCopies = False,
    files: Files | None = None,
) -> Serialised:
    """Pickle `obj` without copying its large buffers; see `dumps` for what is common.

    Parameters
    ----------
    apart : bool
        Classes of the notebook travel apart: the stream only refers to them, `Serialised.classes` lists them.
    target : type, optional
        `obj` is this class: the receiver takes its state even if it knows the class already.
    reducers : dict, optional
        Functions that reduce objects of these classes, as in `copyreg.dispatch_table`; copies of arrays
        are writable then, as those of `multiprocessing` are.
    share_large : bool or CommonCopies
        Private arrays and tensors of 256 KiB and more are copied into shared memory, which the receiver may
        write to; `CommonCopies` of arrays are mapped copy-on-write.
    files : Files, optional
        How the receiver maps the files of `numpy.memmap`; None: it gets the values of this moment.
    """
    pickler_of = partial(
        _Pickler, store=store, broker=broker, main_globals=main_globals, reducers=reducers, files=files
    )
    pickler = pickler_of(apart=apart, target=target, share_large=share_large)
    error = pickler.run(obj)
    if isinstance(error, (NbParallelError, MemoryError)):
        raise error
    if error is not None:
        text = explain(obj, error, name=name, attempt=lambda part: pickler_of().run(part))
        raise UnpicklableError(text) from error
    return pickler.made


def dump_error(error: BaseException, main_globals: Mapping[str, Any] | None = None) -> bytes | None:
    """Pickle an exception by value; return None if it would not arrive as what it is.

    With `main_globals` None they are this process's own.
    """
    main_globals = own_globals() if main_globals is None else main_globals
    pickler = _Pickler(BY_VALUE, None, main_globals)
    if pickler.run(error) is not None:
        return None
    data = pickler.made.pack(BY_VALUE).data
    try:
        return data if type(load_error(data)) is type(error) else None
    except UnpicklableError:
        return None


def load_error(data: bytes) -> Any:
    """Rebuild the exception of `dump_error`."""
    return loads(data, BY_VALUE, name="an exception")


# Digest of an object's content, by which a process notices later that the object was changed in place.

MOST_STREAM = 1 << 20
"""Bytes of the pickle stream, which take some 10 ms; a larger object has no digest."""
MOST_BUFFERS = 64 << 20
"""Bytes of large buffers, which take some 10 ms; of those beyond it only the size counts."""


class _LimitedFile(io.BytesIO):
    """A file that ends a pickler which writes too much."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MOST_STREAM:
            raise OverflowError(f"the stream is longer than {MOST_STREAM} bytes")
        return super().write(data)


def content_digest(obj: Any, store: Store, main_globals: Mapping[str, Any]) -> bytes | None:
    """Return what changes when `obj` is changed in place; None if it is too large or cannot be pickled.

    Only digests of one object in one process are comparable: an equal object elsewhere can have another.
    Arrays in shared memory count as what they are, not by their content.
    """
    pickler = _Pickler(store, None, main_globals, file=_LimitedFile(), apart=True)
    pickler.map_files = Files.PRIVATE
    return None if pickler.run(obj) is not None else pickler.made.checksum(MOST_BUFFERS)


def dumps(
    obj: Any,
    store: Store,
    *,
    broker: Any = None,
    main_globals: Mapping[str, Any] | None = None,
    name: str | None = None,
    files: Files | None = None,
) -> Pickled:
    """Turn any object into bytes for another process.

    Parameters
    ----------
    store : Store
        Where shared arrays are known, and where large buffers go.
    broker : SegmentBroker, optional
        Passes the segments to the receiver; None: the receiver is this process.
    main_globals : mapping, optional
        The notebook's (or the rank's) namespace: functions that have it as their globals get the
        receiver's instead.  None on a rank: its own namespace (`set_main_globals`), and the globals that
        those functions read travel with the message, for a receiver that lacks them.  None in another
        process: functions carry copies of the globals that they read, as in cloudpickle.
    name : str, optional
        The user's name for the object, for errors.
    files : Files, optional
        As for `serialise`.

    Returns
    -------
    Pickled
        Hold it until the receiver has loaded it.

    Raises
    ------
    UnpicklableError
        A part cannot be sent: the message names it and where it is.  Nothing was allocated.
    """
    if is_plain(obj):
        data = PLAIN + pickle.dumps(obj, 5)
        return Pickled(data, (), len(data), ())
    if main_globals is None:
        main_globals = definitions.current_main_globals()
        if main_globals is not None:
            options = {"store": store, "broker": broker, "main_globals": main_globals}
            return dump_with_globals(serialise(obj, name=name, **options), options)
    made = serialise(obj, store, broker=broker, main_globals=main_globals, name=name, files=files)
    return made.pack(store, broker=broker)


def dump_with_globals(
    main: Serialised,
    options: Mapping[str, Any],
    *,
    why: Callable[[UnpicklableError], str] = str,
    beyond_ranks: bool = False,
) -> Pickled:
    """Return an object and, each by itself, the globals that its functions read, directly or through another.

    Parameters
    ----------
    options : mapping
        Of `serialise`, as the object was pickled with.
    why : callable
        Returns what is reported to a receiver that lacks a name whose value cannot be sent.
    beyond_ranks : bool
        To a process that is no rank: also what the functions bind, and what every rank has.
    """
    store, broker, main_globals = options["store"], options["broker"], options["main_globals"]
    packed = main.pack(store, broker=broker)
    found: dict[str, Pickled | str] = {}
    digests: dict[str, bytes] = {}
    names = [*main.global_names, *(main.assigned if beyond_ranks else ())]
    while names:
        name = names.pop()
        known = name in found or (definitions.is_predefined(name) and not beyond_ranks)
        if known or name not in main_globals:
            continue
        try:
            part = serialise(main_globals[name], name=name, **options)
        except UnpicklableError as error:
            found[name] = why(error)
            continue
        if beyond_ranks and part.buffers:  # else it is known by its bytes
            digests[name] = part.checksum()
        found[name] = part.pack(store, broker=broker)
        names += [*part.global_names, *(part.assigned if beyond_ranks else ())]
    return join_globals(packed, found, digests)


def _bind_globals(
    parts: Globals, _digests: Mapping[str, bytes], main_globals: dict[str, Any], load: Callable[..., Any]
) -> None:
    """Bind the globals that `main_globals` lacks, all or none."""
    values = {}
    for name, part in parts.items():
        if name in main_globals:
            continue
        if isinstance(part, str):
            raise UnpicklableError(
                f"a function that was sent here reads the global {name!r}, which this rank lacks and which "
                f"cannot be sent ({part}); assign {name!r} on this rank first"
            )
        values[name] = load(part, name=name)
    main_globals.update(values)


def loads(
    data: bytes | memoryview,
    store: Store,
    *,
    broker: Any = None,
    main_globals: dict[str, Any] | None = None,
    name: str | None = None,
    match_classes: bool = True,
    ties: Ties | None = None,
    bind: Callable[..., None] = _bind_globals,  # what this process takes of globals that came along
) -> Any:
    """Rebuild the object that `dumps` turned into `data`.

    Its large buffers are this process's own (copy-on-write); shared arrays inside are the same memory,
    with the rights they were sent with.  Only load what comes from a process of this session.

    Parameters
    ----------
    main_globals : dict, optional
        Globals of the notebook's functions inside.  None: this process's main globals, or ``__main__``'s.
    match_classes : bool
        A class that `main_globals` has from the same source is used instead of a new one: ranks that ran the
        same cell understand each other's instances.
    ties : Ties, optional
        Which tensors inside are those of other messages.

    Raises
    ------
    UnpicklableError
        The object's own code raised while it was rebuilt; that is the cause.
    ProtocolError
        The bytes are no message.
    """
    message = memoryview(data)
    main_globals = own_globals() if main_globals is None else main_globals
    try:
        if message[: len(PLAIN)] == PLAIN:
            return pickle.loads(message[len(PLAIN) :])
        message, parts, digests = split_globals(message)
        if parts:
            options = {"broker": broker, "main_globals": main_globals, "match_classes": match_classes}
            bind(parts, digests, main_globals, partial(loads, store=store, **options))
        stream, buffers = parse_message(message, store, broker)
        return unpickle(stream, buffers, store, broker, main_globals, match_classes=match_classes, ties=ties)
    except (NbParallelError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        what = "an object" if name is None else f"variable {name!r}"
        text = f"{what} could not be rebuilt in this process: {type(error).__name__}: {error}"
        raise UnpicklableError(f"{text}; see the cause for the line that raised") from error
