"""Store: the shared arrays of one process."""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from nbparallel.errors import (
    FileDescriptorLimitError,
    ForkedRankError,
    InvalidHandleError,
    ReadOnlyArrayError,
    SharedMemoryFullError,
)
from nbparallel.sharing import copying, registry
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.holdings import Holdings
from nbparallel.sharing.layout import check_handle, describe
from nbparallel.sharing.mapping import Access, Root
from nbparallel.sharing.pool import Pool
from nbparallel.sharing.segment import Block, Location, SegmentStatistics
from nbparallel.sharing.strategy import Strategy
from nbparallel.wire.handles import ArrayHandle

AnyArray = npt.NDArray[Any]
Shape = SupportsIndex | Sequence[SupportsIndex]
Order = Literal["C", "F"]


P = ParamSpec("P")
R = TypeVar("R")


def _locked(
    method: Callable[Concatenate[Store, P], R],
) -> Callable[Concatenate[Store, P], R]:
    """Refuse a forked child, lock, and have the next operation repair what an interrupt left undone."""

    @functools.wraps(method)
    def locked(self: Store, /, *args: P.args, **keywords: P.kwargs) -> R:
        self.check_pid()
        with self._lock:
            # Not within another operation (a user's __del__ may call us there): it is half done.
            if self._holdings.doubtful and not self._depth:
                self._holdings.repair()
            self._depth += 1
            try:
                return method(self, *args, **keywords)
            except BaseException:
                self._holdings.doubtful = True
                raise
            finally:
                self._depth -= 1

    return locked


class Store:
    """The shared arrays of this process.

    Parameters
    ----------
    client : int
        This process's number in its session: 0 for the notebook, which may be in several sessions.
    pool_nbytes : int, optional
        How much freed memory is kept for reuse; by default 1/32 of the machine's, at most 1 GiB.

    Notes
    -----
    Thread-safe.  In a forked child every method raises `ForkedRankError`, and nothing that dies there has
    any effect on the parent; arrays that exist stay readable there.
    """

    def __init__(self, client: int = 0, *, pool_nbytes: int | None = None) -> None:
        self.client = client
        self.rights_changes = 0
        """Counts calls that changed who may write; lets a caller remember what it asked about an array."""
        self._pid = os.getpid()
        # Reentrant: the garbage collector may run a user's __del__, which may share an array, while we
        # hold it.
        self._lock = threading.RLock()
        self._depth = 0
        self._holdings = Holdings(client, Pool(pool_nbytes))

    # Sessions

    @_locked
    def connect(self, broker: SegmentBroker) -> None:
        """Take part in a session; segments are registered there when first needed."""
        if broker.client != self.client:
            raise ValueError(f"client {self.client} cannot use the broker of client {broker.client}")
        if broker not in self._holdings.brokers:
            self._holdings.brokers.append(broker)

    @_locked
    def disconnect(self, broker: SegmentBroker) -> None:
        """Leave a session; again is fine.  All arrays here stay valid."""
        self._holdings.disconnect(broker)

    def _chosen(self, broker: SegmentBroker | None) -> SegmentBroker | None:
        if broker is not None:
            return broker
        brokers = self._holdings.brokers
        if len(brokers) > 1:
            raise ValueError(f"this process is in {len(brokers)} sessions: say which with broker=")
        return brokers[0] if brokers else None

    # Making arrays

    def empty(
        self, shape: Shape, dtype: npt.DTypeLike = float, order: Order = "C", *, strategy: str | None = None
    ) -> AnyArray:
        """Return a new shared array with arbitrary content, as `numpy.empty`."""
        return self._make(shape, dtype, order, strategy, zero=False)

    def zeros(
        self, shape: Shape, dtype: npt.DTypeLike = float, order: Order = "C", *, strategy: str | None = None
    ) -> AnyArray:
        """Return a new shared array of zeros, as `numpy.zeros`."""
        return self._make(shape, dtype, order, strategy, zero=True)

    def share(self, x: AnyArray, *, strategy: str | None = None) -> AnyArray:
        """Return `x` if it lies in shared memory, else a copy that does.

        The copy keeps dtype, shape, and strides as far as possible (see `copying.plan`).  The rights of
        other processes are not changed; see `allow_write`.

        Raises
        ------
        ObjectArrayError
            `x` holds Python objects.
        SharedMemoryFullError, FileDescriptorLimitError
            It does not fit.
        """
        describe(x.dtype)
        if self.is_shared(x):
            return x
        plan = copying.plan(x)
        root, fresh = self._allocate(plan.nbytes, strategy, plan.verbatim)
        copy: AnyArray = np.ndarray(x.shape, x.dtype, root, plan.offset, plan.strides)
        if plan.verbatim is None:
            np.copyto(copy, x)
        elif not fresh:
            np.copyto(root[: plan.nbytes], plan.verbatim)
        return copy

    def _make(
        self, shape: Shape, dtype: npt.DTypeLike, order: Order, strategy: str | None, *, zero: bool
    ) -> AnyArray:
        if order not in ("C", "F"):
            raise ValueError(f"order must be 'C' or 'F', not {order!r}")
        dt: np.dtype[Any] = np.empty(0, dtype).dtype  # numpy's rule: "S" means "S1" here
        describe(dt)
        sizes = _sizes(shape)
        nbytes = math.prod(sizes) * dt.itemsize
        root, fresh = self._allocate(nbytes, strategy)
        if zero and not fresh:
            root[:nbytes] = 0
        return np.ndarray(sizes, dt, root, 0, None, order)

    @_locked
    def _allocate(self, nbytes: int, strategy: str | None, content: Root | None = None) -> tuple[Root, bool]:
        """Return the root of a new segment, and whether it is fresh: zeros, or `content`."""
        chosen = registry.find_strategy(strategy)
        nbytes = max(nbytes, 1)
        self.drain()
        pooled = self._holdings.pool.take(nbytes, chosen.name)
        block = self._fresh_block(chosen, nbytes, content) if pooled is None else pooled
        # Only the notebook's arrays have to be protected from its ranks.
        return self._holdings.add(block, writable=self.client != 0), pooled is None

    def _fresh_block(self, strategy: Strategy, nbytes: int, content: Root | None) -> Block:
        data = None if content is None or not content.size else content.data
        try:
            return _mapped_block(strategy, nbytes, data)
        except (SharedMemoryFullError, FileDescriptorLimitError):
            # What lies in the pool may be all that is missing.
            if not self.trim():
                raise
        return _mapped_block(strategy, nbytes, data)

    # Looking at arrays

    @_locked
    def is_shared(self, x: object) -> bool:
        """Return whether `x` is an array in shared memory, or a view of one."""
        return self._holdings.find(x) is not None

    @_locked
    def location(self, x: object) -> Location | None:
        """Return where `x` lies in shared memory, or None if it is private."""
        place = self._holdings.find(x)
        if place is None:
            return None
        segment, writable = place.segment, place.mapping.access is Access.WRITE
        return Location(segment.id, place.start, place.stop, writable, segment.writable)

    @_locked
    def allow_write(self, x: AnyArray) -> None:
        """Let every process of the session write to the memory of `x` from now on.

        Raises
        ------
        ReadOnlyArrayError
            The memory belongs to another process, which did not allow this one to write.
        ValueError
            `x` is not shared.
        """
        place = self._holdings.find(x)
        if place is None:
            raise ValueError("only an array in shared memory can be made writable for other processes")
        if place.segment.own:
            self._holdings.allow_write(place.segment)
            self.rights_changes += 1
        elif place.mapping.access is not Access.WRITE:
            raise ReadOnlyArrayError(
                "this array belongs to the notebook and is read-only on ranks: let them write with "
                "`%share name` or `name = nbp.share(name)` in the notebook, or work on `x.copy()`"
            )

    # Handles

    @_locked
    def handle(
        self, x: AnyArray, *, broker: SegmentBroker | None = None, writable: bool = False
    ) -> ArrayHandle | None:
        """Return what another process needs to see the memory of `x`, or None if it is private.

        The segment is registered with the session if that has not happened yet.  The handle holds nothing:
        whoever sends it keeps `x` until it has been attached.
        """
        place = self._holdings.find(x)
        if place is None:
            return None
        form = describe(x.dtype)
        known_as = self._holdings.register(place.segment, self._chosen(broker))
        return ArrayHandle(known_as, place.segment.nbytes, place.offset, x.shape, x.strides, form, writable)

    @_locked
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
            nobody may write to it any more.

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
        self._holdings.bury()
        root = self._holdings.root(handle, access, self._chosen(broker))
        try:
            return np.ndarray(handle.shape, dtype, root, handle.offset, handle.strides)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:
            raise InvalidHandleError(f"numpy refuses a handle: {error}") from error

    # What died

    @_locked
    def drain(self) -> None:
        """Act on arrays that died and on what the sessions said; never waits for an answer."""
        self._holdings.bury()
        self._holdings.collect()
        self._holdings.pool.trim()

    @_locked
    def trim(self) -> int:
        """Give all pooled memory back to the system; return the bytes."""
        return self._holdings.pool.trim(0.0)

    @_locked
    def segments(self) -> tuple[SegmentStatistics, ...]:
        """Return what this process has: own, fetched and pooled segments."""
        self._holdings.bury()
        return self._holdings.statistics()

    @_locked
    def close(self) -> None:
        """Leave all sessions and give back what no array uses; again is fine.

        Arrays that are alive stay valid.
        """
        self._holdings.bury()
        for broker in list(self._holdings.brokers):
            self._holdings.disconnect(broker)
        self._holdings.pool.trim(0.0)

    def check_pid(self) -> None:
        """Raise `ForkedRankError` in any process but the one that made this store."""
        if os.getpid() != self._pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self._pid}, which alone may share arrays; "
                "arrays that exist can be read here, results go back through a pipe or a file"
            )


def _mapped_block(strategy: Strategy, nbytes: int, content: memoryview | None) -> Block:
    source = strategy.create(nbytes, content)
    try:
        return Block(source, strategy.map(source, Access.WRITE))
    except BaseException:
        source.close()
        raise


def _sizes(shape: Shape) -> tuple[int, ...]:
    sizes = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise ValueError(f"negative dimensions are not allowed: {sizes}")
    return sizes


_current: dict[str, Store] = {}


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
        store = _current.setdefault("store", Store())
    store.check_pid()
    return store


def set_current_store(store: Store) -> None:
    """Make `store` the one that `current_store` returns; a rank does so when it starts."""
    _current["store"] = store
