"""Parcels: objects on their way to another process, as an ordinary pickle that any `pickle.loads` opens.

Globals of ``__main__`` travel with its functions, and the receiver says which of them it takes.  A function
of ``__main__`` is rebuilt over the receiver's own ``__main__``: an initializer and the tasks after it see the
same globals, as in a forked child.  What the function reads comes along.  The receiver

* binds a name that it lacks;
* binds it again when the sender's value has changed since it last came: a function that was defined anew;
* else keeps what it has: what an initializer has assigned stays.

A forked child has inherited everything, and nothing has come yet: there the sender's value is taken first if
what was inherited is still bound and cannot have been changed in place, as a function, a class or a number;
lists, dictionaries and arrays may have been filled by an initializer.  The process in which ``__main__`` was
run itself takes nothing that it has.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
import traceback
import types
import weakref
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import pool
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn

from nbparallel.errors import (
    ForkedRankError,
    InvalidHandleError,
    NbParallelError,
    RemoteError,
    UnpicklableError,
)

if TYPE_CHECKING:
    from nbparallel.transfer.pickle_format import Pickled

# Pickling of what needs nothing of ours: as soon as the library does it, without loading numpy.
#
# An attempt ends at the first object that may need us, *before* its own code runs: an object whose
# ``__reduce__`` has effects, such as a connection that is duplicated, is never reduced twice.


def reduce_raised(carrier: Any) -> tuple[Any, ...]:
    """Reduce an exception with its traceback: pickled once, by itself, as its own code may raise anything."""
    from nbparallel.errors.questions import ask, class_name
    from nbparallel.transfer.cell_sources import name_cells
    from nbparallel.transfer.pickling import dump_error

    rebuild, (error, text) = carrier.__reduce__()
    data = ask(lambda: dump_error(error), lambda: None)
    name = class_name(error)
    last = ask(lambda: "".join(traceback.format_exception_only(error)).strip(), lambda: name)
    return rebuild_raised, (rebuild, data, name, last, name_cells(text))


def rebuild_raised(rebuild: Any, data: bytes | None, name: str, last: str, text: str) -> Any:
    """Rebuild an exception with its traceback; one that has not arrived is a `RemoteError`."""
    from nbparallel.errors.questions import ask
    from nbparallel.transfer.pickling import load_error

    error = None if data is None else ask(lambda: load_error(data), lambda: None)
    if error is None:
        error = RemoteError(f"{last} [it cannot be rebuilt]", ename=name, evalue=last.partition(": ")[2])
    return rebuild(error, text)


RAISED: dict[type, Any] = {pool.ExceptionWithTraceback: reduce_raised}  # type: ignore[attr-defined]
"""Reducers of what the library's workers send for an exception; `executor` adds its own."""
_PLAIN_MODULES = frozenset(
    {"builtins", "multiprocessing.managers", "multiprocessing.pool", "multiprocessing.process"}
)
"""Modules whose classes reduce without effects; what such objects hold is looked at in turn."""
_REDUCERS = ChainMap[Any, Any](
    RAISED,
    ForkingPickler._extra_reducers,  # type: ignore[attr-defined]
    copyreg.dispatch_table,
)
"""The tables that the library's pickler copies for each message."""
_MAIN = frozenset({"__main__", "__mp_main__"})


class _Unfit(Exception):  # noqa: N818 - it is no error
    """The object needs our own pickler."""


class _LightPickler(pickle.Pickler):
    dispatch_table = _REDUCERS

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
            if _is_importable(obj):
                return NotImplemented
        elif type(obj).__module__ in _PLAIN_MODULES:
            return NotImplemented
        raise _Unfit


def _is_importable(obj: Any) -> bool:
    """Whether every process finds a function or class under its name."""
    if isinstance(obj, types.MethodType):
        return isinstance(obj.__self__, type) and _is_importable(obj.__self__)
    if isinstance(obj, types.BuiltinFunctionType) and isinstance(obj.__self__, types.ModuleType | None):
        return True
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if module is None or name is None or module in _MAIN or module not in sys.modules:
        return False
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is obj


def try_pickle(obj: Any) -> memoryview | None:
    """Return an ordinary pickle of `obj`; None if it needs our own pickler, or what names the culprit."""
    file = io.BytesIO()
    try:
        _LightPickler(file).dump(obj)
    except (_Unfit, TypeError, AttributeError, pickle.PicklingError, RecursionError):
        return None
    return memoryview(file.getvalue())  # from 3.13 on a file with an exported buffer cannot be closed


# The supervisor under which this process is, as far as messages need it.
#
# A process takes part from its start by a `Process` of ours; a notebook, a script or a rank from its first
# message or process.  One that was forked or started in another way takes no part: what it sends is copied.

_carried = threading.local()


def join_household() -> Any | None:
    """Return this process's membership, which begins now if need be; None where it cannot have one."""
    from nbparallel.multiprocessing import household  # importing this package is cheap

    try:
        return household.membership()
    except ForkedRankError:
        return None


def current_membership() -> Any | None:
    """Return this process's membership, if it has one."""
    household = sys.modules.get("nbparallel.multiprocessing.household")
    return None if household is None else household.current_membership()


def supervised() -> AbstractContextManager[None]:
    """Return a context in which a lost channel is a `SupervisorDiedError`."""
    from nbparallel.multiprocessing import household

    return household.supervised()


@contextmanager
def _carried_mailboxes() -> Iterator[list[int]]:
    """Collect the mailboxes whose reading ends are pickled in this thread in the block."""
    outer: list[int] | None = getattr(_carried, "mailboxes", None)
    found: list[int] = []
    _carried.mailboxes = found
    try:
        yield found
    finally:
        _carried.mailboxes = outer


def note_carried(mailbox: int) -> None:
    """Note that the reading end of a mailbox was pickled."""
    found: list[int] | None = getattr(_carried, "mailboxes", None)
    if found is not None:
        found.append(mailbox)


# One copy for a private array that many tasks of one call hold.
#
# A task that is the only one to hold an array gets a copy of its own, which is shared memory from then on.
# What several may hold is copied once, and each maps that copy copy-on-write: what a task writes stays there.

_CONTAINERS = (tuple, list, dict)
_TWICE = 2
"""How often what a container holds is counted, however many places it is in: more is the same."""


class ArgumentCache:
    """The copies of one call's arrays; each lives until its array or this object does not.

    Parameters
    ----------
    tasks : sequence
        Arguments of the call's tasks.  An array that is in just one place there, however deep in tuples,
        lists and dictionaries, is one task's only.
    """

    def __init__(self, tasks: Sequence[Any]) -> None:
        self._tasks = tasks
        self._single: frozenset[int] | None = None
        self._copies: dict[int, tuple[Any, Any]] = {}

    def copy(self, array: Any, store: Any) -> Any | None:
        """Return the shared copy of a private array; None if just one task holds it."""
        key = id(array)
        if self._single is None:
            self._single = _single_places(self._tasks)
        if key in self._single:
            return None
        if key not in self._copies:
            own = weakref.ref(self)  # a cycle would keep the copies until the garbage collector runs

            def drop(_: object) -> None:
                living = own()
                if living is not None:
                    living._copies.pop(key, None)

            # what a `__reduce__` makes for one message only goes with it
            self._copies[key] = weakref.ref(array, drop), store.share(array, for_all=True)
        return self._copies[key][1]


def _single_places(tasks: Sequence[Any]) -> frozenset[int]:
    """Return the identities of the arrays that are in one place only."""
    array_class = sys.modules["numpy"].ndarray
    arrays: Counter[int] = Counter()
    visits: Counter[int] = Counter()
    waiting: list[Any] = [tasks]
    while waiting:
        container = waiting.pop()
        for part in container.values() if type(container) is dict else container:
            if type(part) is array_class:
                arrays[id(part)] += 1
            elif type(part) in _CONTAINERS and visits[id(part)] < _TWICE:
                visits[id(part)] += 1
                waiting.append(part)
    return frozenset(identity for identity, count in arrays.items() if count == 1)


def pickle_message(
    obj: Any, mailbox: int = 0, copies: ArgumentCache | None = None, *, task: bool = False
) -> tuple[memoryview, int]:
    """Return an ordinary pickle of `obj`, and the parcel that holds its memory; see `pack`."""
    light = try_pickle(obj)
    if light is not None:
        return light, 0
    parcel, data = pack(obj, mailbox, copies, task=task)
    file = io.BytesIO()
    pickle.Pickler(file).dump(ReducedCall(open_parcel, parcel, data))
    return memoryview(file.getvalue()), parcel


class ReducedCall:
    """What is pickled as a call: it is rebuilt as what that returns."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


def withdraw_parcel(parcel: int) -> None:
    """Drop a parcel whose message could not be written."""
    if parcel > 0 and (member := current_membership()) is not None:
        member.take(parcel)


def pack(
    obj: Any, mailbox: int = 0, copies: ArgumentCache | None = None, *, task: bool = False
) -> tuple[int, bytes]:
    """Return what `open_parcel` takes: bytes, and the parcel that holds the memory that they refer to, or 0.

    `copies` are those of the call that the object is a task of (`ArgumentCache`).  A `task` maps the files of
    `numpy.memmap`; anything else, such as its result, has the values of this moment.

    Raises
    ------
    UnpicklableError
        A part cannot be sent.  What its own code raised, if that is no `TypeError`, is raised as it is, with
        a note that names the part: as from the library.
    SharedMemoryFullError, FileDescriptorLimitError
        A large array does not fit into shared memory.
    SupervisorDiedError
        The supervisor was killed, and shared memory is needed.
    """
    from nbparallel.sharing import get_sharing_strategy

    member = join_household()
    if member is None:
        return 0, _pickle(obj, _options(None, task=task)).data
    with supervised(), _carried_mailboxes() as carried:
        options = _options(member, task=task)
        shares = get_sharing_strategy() != "copy"
        made = _pickle(obj, options | {"share_large": shares and (copies or True)})
        return member.post(made.segments, mailbox=mailbox, carried=tuple(carried)), made.data


def why_unsendable(part: Any, name: str, *, task: bool = False) -> Exception | None:
    """Return what sending an object would raise, with `name` as its name; None if it can be sent."""
    from nbparallel.transfer.pickling import serialise

    try:
        serialise(part, name=name, **_options(None, task=task))
    except NbParallelError as error:
        try:
            _raise_as_library(error)
        except Exception as found:  # noqa: BLE001  whatever the object's own code raises
            return found
    return None


def _options(member: Any | None, *, task: bool) -> dict[str, Any]:
    """Return how this process pickles: `serialise` has the names.  Without a member all arrays are copied."""
    from nbparallel.sharing.memory.mapping import Files
    from nbparallel.transfer.pickle_format import BY_VALUE
    from nbparallel.transfer.unpickling import own_globals

    return {
        "store": BY_VALUE if member is None else member.store,
        "broker": None if member is None else member.broker,
        "main_globals": own_globals(),
        "reducers": ChainMap(RAISED, ForkingPickler._extra_reducers),  # type: ignore[attr-defined]  # locks …
        "files": Files.SHARED if task else None,
    }


def _pickle(obj: Any, options: Mapping[str, Any]) -> Pickled:
    """Pickle an object and the globals of ``__main__`` that its functions read."""
    from nbparallel.transfer.pickling import dump_with_globals, serialise

    try:
        main = serialise(obj, **options)
    except UnpicklableError as error:
        _raise_as_library(error)
    # What a function binds comes along, too: the receiver then knows which later value is news.
    # Why one cannot is raised only by a receiver that lacks the name; what to do there is another matter.
    reason = lambda error: str(error).partition(": ")[2].rpartition("; ")[0]  # noqa: E731
    return dump_with_globals(main, options, why=reason, beyond_ranks=True)


def _raise_as_library(error: BaseException) -> NoReturn:
    """Raise what the library would raise: the exception of the object's own code, or a `TypeError`."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, TypeError | pickle.PicklingError):
        raise error  # a SystemExit would end the thread that sends, without a word
    note = str(error)
    if "inheritance" in str(cause):
        note += "; locks and queues go to a process when it starts: args=, or a pool's initargs="
    cause.add_note(note)
    raise cause


def open_parcel(parcel: int, data: bytes) -> Any:
    """Rebuild what `pack` was given: `pickle.loads` of a message calls this.

    Raises
    ------
    InvalidHandleError
        This process takes no part in the sharing of arrays, or a handle is damaged.
    SegmentLostError
        The memory is gone.
    """
    if not parcel:
        return open_message(data, None)
    member = current_membership()
    if member is None:
        raise InvalidHandleError(
            "a shared array came to a process that takes no part in sharing: start it with "
            "nbparallel.multiprocessing's Process or Pool instead of multiprocessing's or os.fork"
        )
    with supervised():
        result = open_message(data, member)
        member.take(parcel)
    return result


def open_message(data: bytes, member: Any | None) -> Any:
    """Rebuild the object of a message, whatever holds its memory until then."""
    from nbparallel.transfer import definitions
    from nbparallel.transfer.pickle_format import BY_VALUE
    from nbparallel.transfer.pickling import loads
    from nbparallel.transfer.unpickling import own_globals

    main_globals = own_globals()
    store = BY_VALUE if member is None else member.store
    broker = None if member is None else member.broker
    known = len(definitions.KNOWN)
    result = loads(data, store, broker=broker, main_globals=main_globals, bind=bind_globals)
    if len(definitions.KNOWN) != known:
        for cls in list(definitions.KNOWN):
            bind_free_name(cls, main_globals)
    return result


_ORIGIN = {"fresh": False}
"""Whether this process began with an empty ``__main__``."""
_came: dict[str, bytes | int] = {}
"""Digest of the value that last came, by name."""
_UNCHANGING = (
    types.FunctionType, type, types.NoneType, bool, int, float, complex, str, bytes, tuple, frozenset, range
)  # fmt: skip
_inherited: list[Mapping[str, Any]] = []
"""What of these a forked child found in its ``__main__``, by name: at most one."""


def unchanging_globals() -> dict[str, Any]:
    """Return those of ``__main__`` that a child which is forked now inherits, and nothing changes in place.

    To be called in the parent: in the child it would copy the page of each value that it looks at.
    """
    found = vars(sys.modules["__main__"]).copy()  # in one step: other threads bind names
    return {name: value for name, value in found.items() if isinstance(value, _UNCHANGING)}


def mark_forked(inherited: Mapping[str, Any]) -> None:
    """Note that this process was forked from another, whose `unchanging_globals` it has."""
    _inherited[:] = [inherited]


def mark_fresh() -> None:
    """Note that this process was started by another, with an empty ``__main__``."""
    _ORIGIN["fresh"] = True


def bind_globals(
    parts: Mapping[str, bytes | str],
    digests: Mapping[str, bytes],
    main_globals: dict[str, Any],
    load: Callable[..., Any],
) -> None:
    """Bind what this process takes of the globals that came along, all or none."""
    values: dict[str, Any] = {}
    came: dict[str, bytes | int] = {}
    for name, part in parts.items():
        if isinstance(part, str):
            if name not in main_globals:
                raise UnpicklableError(
                    f"a function that came here reads the global {name!r}, which cannot be sent: {part}; "
                    "give locks and queues to the process when it starts (args=, or initargs= and an "
                    f"initializer that assigns {name!r}), or create {name!r} there"
                )
            continue
        digest = digests.get(name) or hash(part)
        if _takes(name, digest, main_globals):
            values[name] = load(part, name=name)
        came[name] = digest
    main_globals.update(values)
    _came.update(came)


def _takes(name: str, digest: bytes | int, main_globals: dict[str, Any]) -> bool:
    if name not in main_globals:
        return True
    if name in _came:
        return _came[name] != digest
    if _inherited:
        return name in _inherited[0] and main_globals[name] is _inherited[0][name]
    return _ORIGIN["fresh"]


def bind_free_name(thing: Any, main_globals: dict[str, Any]) -> None:
    """Bind what came from ``__main__`` under its name if that is free, so that `pickle` finds it."""
    if _ORIGIN["fresh"] and getattr(thing, "__module__", None) == "__main__":
        name = getattr(thing, "__qualname__", ".")
        if "." not in name:
            main_globals.setdefault(name, thing)


class SharedPayload:
    """An object as a message that the sender keeps, which any number of processes open.

    Its large private arrays are written into shared memory once, and mapped copy-on-write by each.

    Raises
    ------
    UnpicklableError
        A part cannot be sent: locks and queues cannot, because each process gets its own copy of these.
    """

    def __init__(self, content: Any) -> None:
        member = join_household()
        with supervised():
            self._kept: Any = _pickle(content, _options(member, task=True))
        self._data = self._kept.data

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._data,)

    def open(self) -> Any:
        """Return the object, in a process whose sender still keeps the message."""
        with supervised():
            return open_message(self._data, current_membership())


def _rebuild(data: bytes) -> SharedPayload:
    made = SharedPayload.__new__(SharedPayload)
    made._data, made._kept = data, None
    return made
