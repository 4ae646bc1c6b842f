"""Operations of a checked cell: each says what it reads and fills, and which ranks' past it puts in order.

::

    all_reduce(x)                  CheckedOperations, an observer of the communicator's operations
      read x, publish              what this rank has done so far may be known to the others
      the communicator's method    with plain arrays
      acquire, fill x              what comes now is after what the others have published

Keys are counted from the beginning of the cell by what both sides know: the n-th collective of a group, the
n-th message of a tag from one rank to another.  Messages carry nothing more than without a check.
"""

from __future__ import annotations

import enum
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from nbparallel.distributed.arguments import MISSING
from nbparallel.distributed.communicator import OPERATIONS, Communicator
from nbparallel.distributed.group import Group
from nbparallel.distributed.races.access_log import READ, WRITE, Acquire, BroadcastArray, Key, Publish
from nbparallel.distributed.races.access_recorder import AccessRecorder
from nbparallel.distributed.races.traced_array import (
    TracedArray,
    arrays_in,
    plain,
    replaced,
    trace,
)
from nbparallel.distributed.runtime.observers import Call
from nbparallel.distributed.slots.lock_table import LockTable
from nbparallel.distributed.work import Work


class Order(enum.Enum):
    """Which ranks' past a collective puts before which ranks' future."""

    ALL = enum.auto()
    """All before, all after."""
    FROM_ROOT = enum.auto()
    """The root's before the others'."""
    TO_ROOT = enum.auto()
    """The others' before the root's."""
    PREFIX = enum.auto()
    """Each rank's before those of higher rank."""


class Effect(NamedTuple):
    """What a collective does.

    Attributes
    ----------
    reads, fills : tuple of str
        Parameters; nested lists, tuples and dicts count with all arrays in them.
    output_first : bool
        With both, the first of `reads` is filled from the second; alone, it is read.
    """

    order: Order
    reads: tuple[str, ...] = ()
    fills: tuple[str, ...] = ()
    output_first: bool = False


_ALL, _FROM, _TO = Order.ALL, Order.FROM_ROOT, Order.TO_ROOT
COLLECTIVES: dict[str, Effect] = {
    "all_reduce": Effect(_ALL, ("tensor",), ("tensor",)),
    "all_reduce_coalesced": Effect(_ALL, ("tensors",), ("tensors",)),
    "reduce": Effect(_TO, ("tensor",), ("tensor",)),
    "reduce_scatter": Effect(_ALL, ("tensor", "input_list"), ("output",), output_first=True),
    "reduce_scatter_tensor": Effect(_ALL, ("input",), ("output",)),
    "reduce_scatter_single": Effect(_ALL, ("input",), ("output",)),
    "scan": Effect(Order.PREFIX, ("tensor",), ("tensor",)),
    "exscan": Effect(Order.PREFIX, ("tensor",), ("tensor",)),
    "maxloc": Effect(_ALL, ("tensor", "location")),
    "minloc": Effect(_ALL, ("tensor", "location")),
    "broadcast": Effect(_FROM, ("tensor",), ("tensor",)),
    "scatter": Effect(_FROM, ("tensor", "scatter_list"), output_first=True),
    "gather": Effect(_TO, ("tensor",), ("gather_list",)),
    "all_gather": Effect(_ALL, ("tensor_list", "tensor"), output_first=True),
    "all_gather_coalesced": Effect(_ALL, ("input_tensor_list",), ("output_tensor_lists",)),
    "all_gather_into_tensor": Effect(_ALL, ("input_tensor",), ("output_tensor",)),
    "all_gather_single": Effect(_ALL, ("input_tensor",), ("output_tensor",)),
    "all_to_all": Effect(_ALL, ("output_tensor_list", "input_tensor_list"), output_first=True),
    "all_to_all_single": Effect(_ALL, ("input",), ("output",)),
    "all_gather_object": Effect(_ALL, ("obj",)),
    "gather_object": Effect(_TO, ("obj",)),
    "broadcast_object_list": Effect(_FROM, ("object_list",)),
    "scatter_object_list": Effect(_FROM, ("scatter_object_input_list",)),
    "average_gradients": Effect(_ALL, ("arrays",), ("arrays",)),
    "assert_same": Effect(_ALL, ("x",)),
}
"""Collectives by the names of the communicator's methods; any other orders all, and touches no array."""

UNORDERED = (
    "batches", "get_backend", "get_global_rank", "get_group_rank", "get_process_group_ranks", "get_rank",
    "get_world_size", "grid", "host_group", "local_slice", "lock", "new_group", "new_subgroups",
    "new_subgroups_by_enumeration", "shard", "split", "strict_sync",
)  # fmt: skip
"""Those that order nothing, and read no array, or one of which they return a view."""


class PlainArguments:
    """Turns traced arrays in arguments into plain ones, and results into what the caller passed.

    A container is replaced only if a traced array is in it: an operation may put values into others.
    """

    def __init__(self) -> None:
        self._originals: dict[int, tuple[Any, TracedArray]] = {}
        """By the identity of what stands for it, which is kept, so that no other object gets its number."""

    def plain(self, value: Any) -> Any:
        """Return a value with plain arrays."""
        return replaced(value, {TracedArray: self._plain})

    def _plain(self, array: TracedArray) -> Any:
        found = plain(array)
        self._originals[id(found)] = found, array
        return found

    def original(self, value: Any) -> Any:
        """Return a result with what the caller passed; views of other ranks' arrays are traced."""
        return replaced(value, {np.ndarray: self._original})

    def _original(self, array: Any) -> Any:
        known = self._originals.get(id(array))
        if known is not None:
            return known[1]
        return array if array.flags.writeable else trace(array)


class OperationOrder:
    """The events of one rank in a checked cell, and the arrays that operations under way fill.

    Parameters
    ----------
    interval_ended : callable
        Called at the end of each interval.

    Attributes
    ----------
    events : list of Publish and Acquire
        In program order; each ends an interval.
    broadcasts : list of BroadcastArray
        Arrays in shared memory that were passed to one.
    """

    def __init__(self, recorder: AccessRecorder, interval_ended: Callable[[], None]) -> None:
        self.recorder, self._interval_ended = recorder, interval_ended
        self.events: list[Publish | Acquire] = []
        self.broadcasts: list[BroadcastArray] = []
        self._pending: list[list[Any]] = []

    def add(self, event: Publish | Acquire) -> None:
        """End an interval by an event."""
        self._touch()
        self.events.append(event)
        self.recorder.next_interval()
        self._interval_ended()
        self._touch()

    def _touch(self) -> None:
        """Record what operations under way fill: they may, in each interval until they were waited for."""
        for arrays in self._pending:
            for array in arrays:
                self.recorder.touch(array, WRITE)

    def broadcast(self, key: Key, array: Any, *, is_root: bool) -> None:
        """Record an array that is passed to a broadcast; the kernel knows whether it is the root's."""
        place = self.recorder.locate(array) if array.size else None
        if place is not None:
            access = self.recorder.access_to(place, array, READ if is_root else WRITE)
            self.broadcasts.append(BroadcastArray(key, is_root, access))

    def begin_filling(self, arrays: list[Any]) -> Callable[[], None]:
        """Record writes of arrays from now on, until the function that is returned is called."""
        self._pending.append(arrays)

        def end() -> None:
            self._touch()
            self._pending[:] = [other for other in self._pending if other is not arrays]

        return end


class OrderedLocks:
    """A rank's locks for the time of a checked cell: a release comes before the next acquisition.

    Whose turn came after whose the kernel finds by the times of the acquisitions, which are of one clock for
    all ranks: between two of them lies a release, so that they cannot be out of order.
    """

    def __init__(self, table: LockTable, order: OperationOrder, rank: int) -> None:
        self._table, self._order, self._rank = table, order, rank
        self._turns: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        """Name -> the token of the call that took it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def acquire(self, name: str, deadline_ns: int | None, token: int) -> Any:
        """As `LockTable.acquire`."""
        abandoned = self._table.acquire(name, deadline_ns, token)
        self._turns[name] += 1
        turn = ("lock", name, self._rank, self._turns[name])
        self._order.add(Acquire((("turn", *turn, time.monotonic_ns()),)))
        self._held[name] = token
        return abandoned

    def release(self, name: str) -> None:
        """As `LockTable.release`."""
        self._publish(name)
        self._table.release(name)

    def withdraw(self, token: int) -> None:
        """As `LockTable.withdraw`: a release, of what that call has taken."""
        for name in [name for name, held in self._held.items() if held == token]:
            self._publish(name)
        self._table.withdraw(token)

    def _publish(self, name: str) -> None:
        if self._held.pop(name, None) is not None:
            self._order.add(Publish(("lock", name, self._rank, self._turns[name])))


Options = dict[str, Any]
"""A call's arguments by name."""


class CheckedOperations:
    """Observes a rank's operations for the time of a checked cell.

    Parameters
    ----------
    communicator : Communicator
        Of this epoch; no cell runs on it yet.
    order : OperationOrder
        Receives the events.
    """

    def __init__(self, communicator: Communicator, order: OperationOrder) -> None:
        self._communicator, self._order, self._recorder = communicator, order, order.recorder
        self._calls: Counter[Key] = Counter()
        """Collectives of each group."""
        self._sent: Counter[Key] = Counter()
        self._received: Counter[Key] = Counter()
        for message in communicator.waiting_messages():  # of earlier cells: nothing here has sent them
            self._received["message", message.source, communicator.rank, message.tag, message.group] -= 1
        self._inside = False

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe operations and locks while the block runs."""
        communicator = self._communicator
        locks = communicator.locks
        try:
            communicator.locks = OrderedLocks(locks, self._order, communicator.rank)  # type: ignore[assignment]
            communicator.observers.add(self, OBSERVED)
            yield
        finally:
            communicator.observers.remove(self)
            communicator.locks = locks

    def around(self, name: str, call: Call) -> Call:
        """Return an operation that says what it reads, fills and orders."""
        checked = MESSAGES.get(name, CheckedOperations._collective)

        def observed(*args: Any, **options: Any) -> Any:
            bound = None if self._inside else _bound(name, args, options)
            members = () if bound is None else self._members(bound.get("group"))
            if bound is None or self._communicator.rank not in members:
                return call(*args, **options)  # an operation that is made of others is one; or it raises
            self._inside = True
            try:
                return checked(self, name, call, bound)
            finally:
                self._inside = False

        return observed

    # -- collectives -----------------------------------------------------------------------------------

    def _collective(self, name: str, call: Call, bound: Options) -> Any:
        effect, members = COLLECTIVES.get(name, Effect(Order.ALL)), self._members(bound.get("group"))
        root = self._named(bound, members, "src", "dst")
        reads, fills = _roles(effect, bound, self._communicator.rank == root)
        self._touch(reads, READ)
        published, acquired = self._keys(effect.order, bound.get("group"), members, root)
        if published is not None:
            self._order.add(Publish(published))
        arrays, filled = PlainArguments(), list(arrays_in(fills))
        value = call(**arrays.plain(bound))
        is_async = bound.get("async_op")
        if acquired and not is_async:
            self._order.add(Acquire(acquired))
        if name == "broadcast":
            key = self._key(bound.get("group"), members, root)
            for array in arrays_in(bound.get("tensor")):
                self._order.broadcast(key, array, is_root=self._communicator.rank == root)
            filled = []
        if is_async:
            self._until_waited(value, list(acquired), filled, arrays)
            return value
        self._touch(filled, WRITE)
        return arrays.original(value)

    def _key(self, group: Any, members: tuple[int, ...], member: int) -> Key:
        """Return what a member publishes in the collective of a group that was called last."""
        tag = group.tag if group is not None else ""
        return ("collective", members, tag, self._calls[members, tag], member)

    def _touch(self, values: Any, kind: int) -> None:
        for array in arrays_in(values):
            self._recorder.touch(array, kind)

    def _members(self, group: Any) -> tuple[int, ...]:
        """Return the ranks of a group; none if it is none."""
        if group is None:
            return tuple(range(self._communicator.world_size))
        return group.ranks if isinstance(group, Group) else ()

    def _named(self, bound: Options, members: tuple[int, ...], *names: str) -> int:
        """Return the rank that a call names, by default the first member; -1 if there is none."""
        for name in names:
            rank, place = bound.get(name), bound.get(f"group_{name}")
            if isinstance(place, int | np.integer):
                return members[place] if 0 <= place < len(members) else -1
            if isinstance(rank, int | np.integer):
                return int(rank) if 0 <= rank < self._communicator.world_size else -1
        return members[0]

    def _keys(
        self, order: Order, group: Any, members: tuple[int, ...], root: int
    ) -> tuple[Key | None, tuple[Key, ...]]:
        """Return what this rank publishes before a collective, and acquires after it."""
        rank = self._communicator.rank
        self._calls[members, group.tag if group is not None else ""] += 1

        key = partial(self._key, group, members)
        if order is Order.ALL:
            return key(rank), tuple(map(key, members))
        if order is Order.FROM_ROOT:
            return (key(root), ()) if rank == root else (None, (key(root),))
        if order is Order.TO_ROOT:
            others = tuple(key(member) for member in members if member != root)
            return (None, others) if rank == root else (key(rank), ())
        return key(rank), tuple(map(key, members[: members.index(rank)]))

    def _until_waited(self, work: Work, keys: list[Key], filled: list[Any], arrays: PlainArguments) -> None:
        """Have what follows a successful `wait` be after `keys`; until then the arrays are being filled."""
        end_filling = self._order.begin_filling(filled)
        wait, is_completed = work.wait, work.is_completed
        pending = [True]

        def acquire() -> None:
            if pending:
                pending.clear()
                end_filling()
                work._value = arrays.original(work._value)
                if keys:
                    self._order.add(Acquire(tuple(keys)))

        def ordered_wait(timeout: Any = None) -> bool:
            done = wait(timeout)
            acquire()
            return done

        def ordered_is_completed() -> bool:
            done = is_completed()
            if done and work.exception() is None:
                acquire()
            return done

        work.wait = ordered_wait  # type: ignore[method-assign]
        work.is_completed = ordered_is_completed  # type: ignore[method-assign]

    # -- messages --------------------------------------------------------------------------------------

    def _message(self, counts: Counter[Key], source: int, receiver: int, bound: Options) -> Key:
        """Return the key of the message that this rank sends, or has received, now."""
        word = 0 if bound.get("group") is None else bound["group"].word
        key = "message", source, receiver, bound.get("tag", 0), word
        counts[key] += 1
        return (*key, counts[key])

    def _received_from(self, source: int, bound: Options) -> Key:
        return self._message(self._received, source, self._communicator.rank, bound)

    def _send(self, name: str, call: Call, bound: Options) -> Any:
        """Of `isend` the value is read when it begins."""
        if not bound.get("view"):  # a view is read where it is received
            self._touch(bound.get("tensor"), READ)
        receiver = self._named(bound, self._members(bound.get("group")), "dst")
        if receiver >= 0:
            key = self._message(self._sent, self._communicator.rank, receiver, bound)
            self._order.add(Publish(key))
        return call(**PlainArguments().plain(bound))

    def _recv(self, name: str, call: Call, bound: Options) -> Any:
        arrays, tensor, return_source = PlainArguments(), bound.get("tensor"), bound.get("return_source")
        value, source = call(**arrays.plain(bound) | {"return_source": True})
        value = arrays.original(value)
        if source >= 0:  # else `PROC_NULL`
            self._order.add(Acquire((self._received_from(source, bound),)))
            self._touch(tensor, WRITE)
        if return_source:
            return value, source
        return value if tensor is None else source

    def _irecv(self, name: str, call: Call, bound: Options) -> Work:
        """Receive into an array, which is filled at any time until it was waited for."""
        arrays, keys = PlainArguments(), list[Key]()
        work: Work = call(**arrays.plain(bound))

        finish = work.finish

        def noted(value: Any = None, source: int = -1) -> None:
            if source >= 0:
                keys.append(self._received_from(source, bound))
            finish(value, source)

        if work.done and work._source >= 0:
            keys.append(self._received_from(work._source, bound))
        work.finish = noted  # type: ignore[method-assign]  # matched later, perhaps before an earlier one
        self._until_waited(work, keys, list(arrays_in(bound.get("tensor"))), arrays)
        return work


MESSAGES: dict[str, Callable[[CheckedOperations, str, Call, Options], Any]] = {
    "send": CheckedOperations._send, "isend": CheckedOperations._send, "recv": CheckedOperations._recv,
    "irecv": CheckedOperations._irecv,
}  # fmt: skip
"""Operations between two ranks: before `send`, after `recv`."""
COMPOSED = ("batch_isend_irecv", "recv_object_list", "send_object_list", "sendrecv")
"""Made of others that are observed."""
OBSERVED = tuple(name for name in OPERATIONS if name not in (*UNORDERED, *COMPOSED))


def _roles(effect: Effect, bound: dict[str, Any], is_root: bool) -> tuple[list[Any], list[Any]]:
    """Return the arguments that this rank's call reads, and those that it fills."""
    reads = [bound.get(name) for name in effect.reads]
    fills = [bound.get(name) for name in effect.fills]
    if effect.output_first:
        first, second = reads
        if effect.order is Order.FROM_ROOT and not is_root:  # scatter
            return [], [first]
        if second is None or second is MISSING:
            return [first], fills
        return [second], [first, *fills]
    if effect.order is Order.FROM_ROOT:
        return (reads, []) if is_root else ([], fills)
    if effect.order is Order.TO_ROOT and not is_root:
        return reads, []
    return reads, fills


def _bound(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name; None if they do not fit."""
    try:
        arguments = _signature(name).bind(None, *args, **options).arguments
    except TypeError:
        return None
    return {name: value for name, value in arguments.items() if name != "self"}


@cache
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(getattr(Communicator, name))
