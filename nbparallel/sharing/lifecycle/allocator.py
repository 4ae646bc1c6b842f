"""Allocation: memory for a new array, from the pool, a region or the system."""

from __future__ import annotations

import time
from typing import cast

from nbparallel.errors import FileDescriptorLimitError, InternalError, SharedMemoryFullError
from nbparallel.sharing.lifecycle.exported_segments import DEDICATED_SHARE
from nbparallel.sharing.lifecycle.segment import Block
from nbparallel.sharing.lifecycle.segment_table import SegmentTable
from nbparallel.sharing.memory.mapping import Access, Content, Root
from nbparallel.sharing.memory.memory_limits import check_descriptor, check_mappings, descriptor_limit
from nbparallel.sharing.strategies.strategy import Strategy

PATIENCE_SECONDS = 0.2
"""Time within which memory that no other process holds is returned, if the supervisor is not very busy."""
PAUSE_SECONDS = 0.0001
"""Between two polls."""
WORTH_SECONDS = 5e-12
"""Wait for each byte that may be returned: 1/50 of what it takes to allocate and touch it."""
WORTH_NBYTES = 16 << 20
"""Smaller memory is not waited for."""


def await_return(table: SegmentTable, nbytes: int, strategy: str) -> Block | None:
    """Return pooled memory, also if other processes are just releasing it; None if there is none.

    A program that deletes a large array and makes the next is often quicker than the ranks' notice that they
    do not use it any more.
    """
    limit = time.monotonic() + nbytes * WORTH_SECONDS
    while True:
        table.collect()
        block = table.pool.take(nbytes, strategy)
        if block is not None or nbytes < WORTH_NBYTES or time.monotonic() >= limit:
            return block
        if not table.pool.budget.allows(nbytes, nbytes):
            return None  # it will not be kept
        if not any(table.pool.fits(away, nbytes, strategy) for away in table.own.released):
            return None
        time.sleep(PAUSE_SECONDS)


def make_room(table: SegmentTable) -> bool:
    """Free what is pooled or just being released elsewhere; return whether there was anything."""
    freed = table.cache.trim(0.0) + table.pool.trim(0.0) > 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := len(table.own.released):
        table.collect()
        table.pool.trim(0.0)
        if len(table.own.released) < left:
            freed = True
        elif time.monotonic() >= deadline:
            break
        else:
            time.sleep(0.001)
    return freed


class Allocator:
    """Makes segments of one strategy and right; not thread-safe, the store locks."""

    def __init__(self, table: SegmentTable, strategy: Strategy, *, writable: bool) -> None:
        self._table, self._strategy, self._writable = table, strategy, writable

    def dedicated(self, nbytes: int, content: Content | None = None) -> tuple[Root, bool]:
        """Return the root of a dedicated segment, and whether it is fresh: zeros, or `content`."""
        block, fresh = self._block(nbytes, content)
        if not fresh:
            # It may have been written through its descriptor only.
            block.mapping.populate()
        poolable = self._strategy.reuses_memory
        return self._table.add(block, writable=self._writable, poolable=poolable), fresh

    def packed(self, nbytes: int) -> Root:
        """Return the root of an extent in a region of several arrays; its content is arbitrary.

        Where regions have become wasteful it is a dedicated segment, as long as there are few of those.
        """
        regions = self._table.own.regions
        extent = regions.allocate(self._strategy, nbytes, writable=self._writable)
        if extent is None:
            few = self._table.mapped < descriptor_limit() // DEDICATED_SHARE
            if few and regions.wasteful(self._strategy, writable=self._writable):
                return self.dedicated(nbytes)[0]
            self._table.add_region(
                self._region_block(nbytes), writable=self._writable, poolable=self._strategy.reuses_memory
            )
            extent = regions.allocate(self._strategy, nbytes, writable=self._writable)
        if extent is None:
            raise InternalError(f"a new region has no room for {nbytes} bytes: please file a bug")
        return extent

    def _region_block(self, nbytes: int) -> Block:
        """Return memory for a region; where there is too little left, for this array alone."""
        size = self._table.own.regions.next_nbytes(self._strategy, nbytes, writable=self._writable)
        try:
            return self._block(size)[0]
        except SharedMemoryFullError:
            return self._block(nbytes)[0]

    def _block(self, nbytes: int, content: Content | None = None) -> tuple[Block, bool]:
        """Return memory, and whether it is fresh: zeros, or `content`."""
        table, name = self._table, self._strategy.name
        pooled = table.pool.take(nbytes, name)
        if pooled is None:
            # Only now: polling the sessions takes as long as all the rest.
            pooled = await_return(table, nbytes, name)
            table.trim()
        return (self._fresh_block(nbytes, content), True) if pooled is None else (pooled, False)

    def _fresh_block(self, nbytes: int, content: Content | None) -> Block:
        try:
            return self._mapped_block(nbytes, content)
        except (SharedMemoryFullError, FileDescriptorLimitError) as error:
            # What is pooled, or just being released elsewhere, may be all that is missing.
            others = isinstance(error, SharedMemoryFullError) and self._table.sessions.make_room()
            if not make_room(self._table) and not others:
                raise
        deadline = time.monotonic() + (PATIENCE_SECONDS if others else 0.0)
        while time.monotonic() < deadline:
            try:
                return self._mapped_block(nbytes, content)
            except SharedMemoryFullError:
                time.sleep(0.005)
                self._table.collect()  # what this process has kept mapped of theirs
        return self._mapped_block(nbytes, content)

    def _mapped_block(self, nbytes: int, content: Content | None) -> Block:
        intended: list[str] = []

        def intend(path: str) -> None:
            intended.append(path)
            self._table.sessions.intend(path)

        source = None
        check_mappings(self._table.mapped, nbytes)
        try:
            # messages pass parts, one behind the other; they use no strategy but our own, which take them
            source = self._strategy.create(nbytes, cast("memoryview | None", content), intend)
            check_descriptor(source.fd)
            return Block(source, self._strategy.map(source, Access.WRITE))
        except BaseException:
            if source is not None:
                source.close()
            for path in intended:
                self._table.sessions.removed(path)
            raise
