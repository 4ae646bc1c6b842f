"""Store: the shared arrays of one process."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from nbparallel.errors import ForkedRankError, InvalidHandleError
from nbparallel.sharing.lifecycle.exported_segments import MemoryPool
from nbparallel.sharing.lifecycle.segment import (
    Block,
    Inherited,
    Location,
    Segment,
    SegmentBroker,
    SegmentStatistics,
)
from nbparallel.sharing.lifecycle.segment_table import Allocator, SegmentTable
from nbparallel.sharing.memory import array_layout
from nbparallel.sharing.memory.array_layout import Shape, check_handle, describe_dtype, sizes_of
from nbparallel.sharing.memory.mapping import Access, Content, Root, write_content
from nbparallel.sharing.strategies import registry
from nbparallel.sharing.strategies.strategy import SegmentSource, Strategy
from nbparallel.wire.name_updates import ArrayHandle

# Locking: how every operation of a store begins and ends.

P = ParamSpec("P")
R = TypeVar("R")


def forked_error(owner: int) -> ForkedRankError:
    """Return the error of a child that was forked from process `owner`."""
    return ForkedRankError(
        f"this process ({os.getpid()}) was forked from {owner}, which alone may share arrays; "
        "arrays that exist can be read here, results go back through a pipe or a file"
    )


def locked(method: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Refuse forked children, hold the lock, and repair what an interrupt left undone before."""

    @functools.wraps(method)
    def wrapper(self: Store, /, *args: P.args, **keywords: P.kwargs) -> R:
        if os.getpid() != self._pid:
            raise forked_error(self._pid)
        with self._lock:
            # Not within another operation (a user's __del__ may call us there): it is half done.
            if self._table.doubtful and not self._depth:
                self._table.repair()
            self._depth += 1
            try:
                return method(self, *args, **keywords)
            except BaseException:
                self._table.doubtful = True
                raise
            finally:
                self._depth -= 1

    return wrapper


AnyArray = npt.NDArray[Any]
Order = Literal["C", "F"]
BUSY_SECONDS = 0.05
"""Until the next `tend` while another thread uses the store."""


class Store:
    """The shared arrays of this process.

    Parameters
    ----------
    client : int
        This process's number in its session: 0 for the notebook, which may be in several sessions.
    pool_nbytes : int, optional
        How much freed memory is kept for reuse; by default 1/8 of what the machine and the container
        have left, at most 1 GiB, and nothing while this process is in no session.

    Notes
    -----
    Thread-safe.  In a forked child every method raises `ForkedRankError`, and nothing that dies there has
    any effect on the parent; arrays that exist stay readable there.
    """

    client: int
    rights_changes: int

    def __init__(self, client: int = 0, *, pool_nbytes: int | None = None) -> None:
        self.client = client
        self.rights_changes = 0
        """Counts changes of rights and ids; lets a caller remember what it asked about an array."""
        self._pid = os.getpid()
        # Reentrant: the garbage collector may run a user's __del__, which may share an array, while we
        # hold it.
        self._lock = threading.RLock()
        self._depth = 0
        self._table = SegmentTable(client, MemoryPool(pool_nbytes))

    # Sessions

    @locked
    def connect(self, broker: SegmentBroker, *, aside: bool = False) -> None:
        """Take part in a session, by name only (``broker=``) with `aside`; segments are registered late."""
        if broker.client != self.client:
            raise ValueError(f"client {self.client} cannot use the broker of client {broker.client}")
        self._table.connect(broker, aside=aside)

    @locked
    def disconnect(self, broker: SegmentBroker) -> None:
        """Leave a session (idempotent).  All arrays here stay valid."""
        self._table.disconnect(broker)

    @locked
    def change_client_id(self, client: int) -> None:
        """Become another client: the process joins a world, or has left one; its arrays stay valid.

        Segments bear the number of their maker, so they get new ids, which no process knows yet.

        Raises
        ------
        ValueError
            The store is in a session, where its segments are known by their ids.
        """
        if self._table.brokers:
            raise ValueError(
                f"this process is client {self.client} of a session, and cannot be {client} as well"
            )
        self.client = client
        self._table.own.change_client_id(client)
        self.rights_changes += 1

    @property
    def brokers(self) -> Sequence[SegmentBroker]:
        """The sessions that this process is in, but for those aside."""
        return self._table.sessions.usual

    # Messages in flight, and forked children

    @locked
    def mark_posted(self, segments: Iterable[int]) -> None:
        """Record that messages hold segments: of those that no array here uses, few descriptors are kept."""
        self._table.own.mark_posted(segments)

    @locked
    def prepare_fork(self, broker: SegmentBroker) -> list[Inherited] | None:
        """Return what a child that is forked now will have, as the table does; locked until `fork_done`."""
        self._table.reap()
        inherited = self._table.prepare_fork(broker)
        self._lock.acquire()
        return inherited

    def fork_done(self) -> None:
        """Let other threads use the store again."""
        self._lock.release()

    @locked
    def inherit(self, inherited: Iterable[Inherited], broker: SegmentBroker) -> None:
        """Know the arrays that this process, a forked child, has from its parent; held until it ends."""
        self._table.inherit(inherited, broker)

    # Making arrays

    def empty(
        self,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        order: Order = "C",
        *,
        strategy: str | None = None,
        for_all: bool = False,
    ) -> AnyArray:
        """Return a new shared array with arbitrary content, as `numpy.empty`.

        Parameters
        ----------
        strategy : str, optional
            By default what messages use, whatever the user chose for arrays: see `registry.transport`.
        for_all : bool
            Whether every process of the session may write to it from the start.
        """
        return self._make(shape, dtype, order, strategy, zero=False, for_all=for_all)

    def zeros(
        self,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        order: Order = "C",
        *,
        strategy: str | None = None,
        for_all: bool = False,
    ) -> AnyArray:
        """Return a new shared array of zeros, as `numpy.zeros`; parameters as `empty`."""
        return self._make(shape, dtype, order, strategy, zero=True, for_all=for_all)

    def share(self, x: AnyArray, *, strategy: str | None = None, for_all: bool = False) -> AnyArray:
        """Return `x` if it is in shared memory, else a copy that is.

        The copy keeps dtype, shape, and strides as far as possible (see `array_layout.plan_copy`).

        Parameters
        ----------
        strategy : str, optional
            Of the copy; by default the current one, or that of `x`.
        for_all : bool
            Make sure that every process can be allowed to write to it (`allow_write`): what is packed with
            arrays that they may only read is copied once more.

        Raises
        ------
        ObjectArrayError
            `x` holds Python objects.
        SharedMemoryFullError, FileDescriptorLimitError
            It does not fit.
        """
        describe_dtype(x.dtype)
        if (segment := self._segment_of(x)) is not None:
            if not (for_all and segment.packed_read_only):
                return x
            strategy = strategy or segment.strategy
        plan = array_layout.plan_copy(x)
        chosen = registry.find_strategy(strategy)
        root, _ = self._allocate(plan.nbytes, chosen, plan.content, for_all=for_all)
        copy: AnyArray = np.ndarray(x.shape, x.dtype, root, plan.offset, plan.strides)
        if plan.content is None:
            np.copyto(copy, x)
        return copy

    def join(self, parts: Sequence[memoryview]) -> Root:
        """Return a new shared array of bytes: those of `parts`, one behind the other."""
        nbytes = sum(part.nbytes for part in parts)
        return self._allocate(nbytes, registry.transport(), tuple(parts), pack=False)[0][:nbytes]

    def _make(
        self, shape: Shape, dtype: npt.DTypeLike, order: Order, name: str | None, zero: bool, for_all: bool
    ) -> AnyArray:
        if order not in ("C", "F"):
            raise ValueError(f"order must be 'C' or 'F', not {order!r}")
        dt: np.dtype[Any] = np.empty(0, dtype).dtype  # numpy's rule: "S" means "S1" here
        describe_dtype(dt)
        sizes = sizes_of(shape)
        nbytes = math.prod(sizes) * dt.itemsize
        chosen = registry.transport() if name is None else registry.find_strategy(name)
        root, fresh = self._allocate(nbytes, chosen, for_all=for_all, pack=name is not None)
        if zero and not fresh:
            root[:nbytes] = 0
        return np.ndarray(sizes, dt, root, 0, None, order)

    @locked
    def _allocate(
        self,
        nbytes: int,
        strategy: Strategy,
        content: Content | None = None,
        *,
        for_all: bool = False,
        pack: bool = True,
    ) -> tuple[Root, bool]:
        """Return memory for a new array, with its content, and whether it is fresh: the rest is zeros."""
        # Only the notebook's arrays have to be protected from its ranks.
        writable = for_all or self.client != 0
        nbytes = max(nbytes, 1)
        # Not within another operation, where a user's __del__ may come: see region, note [re-entrance].
        packs = pack and nbytes < strategy.packs_below and self._depth == 1
        self._table.reap()
        allocator = Allocator(self._table, strategy, writable=writable)
        root, fresh = (allocator.packed(nbytes), False) if packs else allocator.dedicated(nbytes, content)
        if content is not None and not fresh:
            write_content(root, content)
        return root, fresh

    @locked
    def adopt(self, source: SegmentSource, access: Access, *, for_all: bool) -> Root:
        """Return the root of memory that was made elsewhere, such as a user's file, as an own segment."""
        self.drain()
        block = Block(source, registry.strategy_of(source.strategy).map(source, access))
        return self._table.add(block, writable=for_all, poolable=False)

    # Inspecting arrays

    @locked
    def is_shared(self, x: object) -> bool:
        """Return whether `x` is an array in shared memory, or a view of one."""
        return self._table.find(x) is not None

    @locked
    def _segment_of(self, x: object) -> Segment | None:
        return None if (location := self._table.find(x)) is None else location.segment

    @locked
    def location(self, x: object) -> Location | None:
        """Return segment and bytes of `x` in shared memory, or None if it is private."""
        location = self._table.find(x)
        if location is None:
            return None
        segment, writable = location.segment, location.mapping.access is Access.WRITE
        return Location(segment.id, location.start, location.stop, writable, segment.writable)

    @locked
    def packed_read_only(self, x: object) -> tuple[int, int] | None:
        """Return which array `x` is part of, (segment, first byte), if only moving it lets others write.

        It is then packed with arrays that they may only read.  Otherwise None.
        """
        return self._table.packed_read_only(x)

    @locked
    def allow_write(self, x: AnyArray) -> None:
        """Let every process of the session write to the memory of `x` from now on.

        Raises
        ------
        ReadOnlyArrayError
            The memory belongs to another process, which did not allow this one to write.
        ValueError
            `x` is not shared, or packed with arrays that others may only read: share it first.
        """
        self.rights_changes += self._table.allow_write(x)

    # Handles

    @locked
    def handle(
        self, x: AnyArray, *, broker: SegmentBroker | None = None, writable: bool | None = False
    ) -> ArrayHandle | None:
        """Return what another process needs to see the memory of `x`, or None if it is private.

        The segment is registered with the session if that has not happened yet.  The handle holds nothing:
        its sender keeps `x` until it has been attached.  With `writable` None the receiver
        is to write if every process may, and `x` is not flagged read-only.
        """
        location = self._table.find(x)
        if location is None:
            return None
        if writable is None:
            writable = location.segment.writable and x.flags.writeable
        form, segment = describe_dtype(x.dtype), location.segment
        if segment.region is not None:
            segment.region.mark_sent(location.offset)
        session_id = self._table.own.register(segment, self._table.sessions.choose(broker))
        memory = segment.memory if session_id == segment.id else 0
        layout = session_id, segment.nbytes, location.offset, x.shape, x.strides
        return ArrayHandle(*layout, form, writable, segment.strategy, memory)

    @locked
    def attach(
        self,
        handle: ArrayHandle,
        *,
        writable: bool = False,
        private: bool = False,
        broker: SegmentBroker | None = None,
    ) -> AnyArray:
        """Return the array that a handle describes: a view of the same memory, never a copy.

        All arrays of one segment with the same right share one mapping.  What this process made itself
        comes back with its own right to write.

        Parameters
        ----------
        writable : bool
            Map it for writing.
        private : bool
            Map it copy-on-write instead: what is written stays here.  What others write is seen or not, so
            no process may write to it any more.

        Raises
        ------
        InvalidHandleError
            The handle is damaged.
        SegmentLostError
            The memory is no longer there.
        ReadOnlyArrayError
            `writable` is not allowed.
        """
        dtype = check_handle(handle)
        access = Access.PRIVATE if private else Access.WRITE if writable else Access.READ
        self._table.reap()
        root, start = self._table.root(handle, access, self._table.sessions.choose(broker))
        try:
            return np.ndarray(handle.shape, dtype, root, handle.offset - start, handle.strides)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise InvalidHandleError(f"numpy refuses a handle: {error}") from error

    @locked
    def drain(self) -> None:
        """Act on arrays that died and on the sessions' notices; never wait for an answer."""
        self._table.reap()
        self._table.collect()
        self._table.trim()

    def tend(self) -> float | None:
        """Do what `drain` does, never waiting; return the seconds until the next call, if that is known."""
        if os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return BUSY_SECONDS
        try:
            self.drain()
            return self._table.seconds_left()
        finally:
            self._lock.release()

    @property
    def pool(self) -> MemoryPool:
        """Freed memory that is kept for reuse."""
        return self._table.pool

    def connected(self, broker: SegmentBroker | None = None) -> bool:
        """Return whether this process takes part in a session: this one, or any."""
        return bool(self._table.brokers) if broker is None else broker in self._table.brokers

    @locked
    def trim(self) -> int:
        """Free all pooled memory, unmap cached mappings of others' memory; return the bytes freed."""
        return self._table.trim(0.0)

    @locked
    def segments(
        self, broker: SegmentBroker | None = None, *, fetched: bool = True
    ) -> tuple[SegmentStatistics, ...]:
        """Return what this process has: own, fetched (only from `broker`, if given) and pooled segments."""
        self._table.reap()
        return self._table.statistics(broker, fetched=fetched)

    @locked
    def close(self) -> None:
        """Leave all sessions and release unused memory (idempotent); living arrays stay valid."""
        self._table.reap()
        for broker in list(self._table.brokers):
            self._table.disconnect(broker)
        self._table.trim(0.0)


# The current store: that of this process.

_current: dict[str, Store] = {}
_session: dict[str, tuple[int, SegmentBroker]] = {}
"""What `begin_in_session` was given, and the process that called it."""


def current_store() -> Store:
    """Return this process's store, made on first use.

    Raises
    ------
    ForkedRankError
        This process was forked from the one that made it.
    """
    store = _current.get("store")
    if store is None:
        # `setdefault` is atomic: no lock that a fork could leave locked.
        store = _current.setdefault("store", _new_store())
    if os.getpid() != store._pid:
        raise forked_error(store._pid)
    return store


def set_current_store(store: Store) -> None:
    """Make `store` the one that `current_store` returns; a rank does so when it starts."""
    _current["store"] = store


def begin_in_session(broker: SegmentBroker) -> None:
    """Have `current_store` return a store of the broker's session, made on first use.

    Many a process that another one starts shares no array, and a store is a tenth of its start.
    """
    _session["begun"] = os.getpid(), broker
    _current.pop("store", None)  # its parent's, if this process was forked


def _new_store() -> Store:
    if not _session:
        return Store()
    owner, broker = _session["begun"]
    if os.getpid() != owner:
        raise forked_error(owner)
    store = Store(broker.client)
    store.connect(broker)
    return store
