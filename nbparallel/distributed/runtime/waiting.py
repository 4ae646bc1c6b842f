"""Waiting for a word of another rank, and waking the ranks that wait for one's own: spin, yield, futex.

The steps: a bounded spin (only if there is a processor for every rank) → at most 100 µs of
``sched_yield`` → asleep in ``futex`` (by ctypes) in slices of at most 50 ms.  After every slice, and at
every wake, the caller's `check` tests for deaths, failures and deadlocks; signal handlers run.

Note [no lost wake-ups].  Every rank has a *bell* word, which it alone changes, and a *parked* word, in
which it alone writes which rank it sleeps for.  The waiter: parked = peer; b = peer's bell; fence; load the
condition; sleep while the bell is b.  The peer: write the condition; fence; if a rank is parked for it,
bell += 1 and wake.  Between "write mine" and "read yours" stands a full fence on both sides, or both could
read the old value: x86 too lets a load pass an earlier store elsewhere (Dekker's problem).  So either
the peer sees the waiter parked, and the changed bell makes the sleep end or not begin, or the waiter sees
the condition.  The fence stands behind the bell: with weak order a new bell and an old condition could be
seen else.  The slice bounds whatever was overlooked.

Note [fence].  An uncontended `threading.Lock` is the fence: acquiring is an atomic read-modify-write and
releasing another one (``sem_trywait`` and ``sem_post``; a compare-and-swap since 3.13).  On x86 either is
a full barrier.  On machines with weak order an acquire may be passed by earlier stores and a release by
later loads, but not the release of one round by the acquire of the next: there it is done twice, and also
before every word that announces data.  `acquire(False)` never blocks, so that an interrupt between the two
calls cannot leave a lock that the next fence would wait for.

Some facts about futexes (futex(2)): the key of a shared mapping is the page of the file, so that processes
with different mappings meet; the word has 32 bits; FUTEX_WAIT compares and sleeps atomically, EAGAIN if it
differs; a signal ends it with EINTR; ``futex_waitv`` (Linux 5.16) sleeps on up to 128 words.  With bits
(FUTEX_WAIT_BITSET, whose time-out is a point in time) a wake only reaches sleepers that share one with it:
a message to one rank leaves the others that sleep on its sender's bell asleep.  ``futex_waitv`` has all bits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nbparallel.errors import ForkedRankError, NbParallelError
from nbparallel.wire.control import ControlView, Operation
from nbparallel.wire.control_layout import BELL, PARKED

SLICE_NS = 50_000_000
"""Longest sleep between two checks of whether the wait can still succeed."""
YIELD_NS = 100_000
"""Longest time of yielding the processor before sleeping; a wake-up costs 5 to 40 µs."""
SPINS = 1500
"""Loads of a word before the first yield: about 40 µs, what a sleep and its wake would cost.  ``python -m
benchmarks.operations.tuning``: four times as many are as good, a quarter takes longer."""
MIN_SPINS = 16
SWITCH_NS = 3_000
"""A yield takes 0.5 µs if no other thread wants the processor, and more than this if one does."""
ANY_RANK = 0xFFFF_FFFF
STRONG_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_WAIT, _WAKE = 9, 10
"""FUTEX_WAIT_BITSET, FUTEX_WAKE_BITSET."""
_ALL_WAITERS = 0x7FFF_FFFF
_ALL_BITS = 0xFFFF_FFFF
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(
    platform.machine(), -1
)
_SYS_FUTEX_WAITV = 449
_MAX_WAITV = 128
_ENOSYS = 38


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _WaitV(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def find_syscall() -> Callable[..., int] | None:
    """Return syscall(2), with which futexes are called; None where there are none."""
    if not sys.platform.startswith("linux") or _SYS_FUTEX < 0 or sys.maxsize < 1 << 32:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _from_now(nanoseconds: int) -> _Timespec:
    end = time.monotonic_ns() + nanoseconds
    return _Timespec(end // 1_000_000_000, end % 1_000_000_000)


def rank_bit(rank: int) -> int:
    """Return the bit that a rank sleeps with, which it shares with every 32nd."""
    return 1 << (rank & 31)


class Waiter:
    """One rank's side of waiting and waking; used by one thread at a time.

    Parameters
    ----------
    spin : bool
        Whether there is a processor for every rank.
    """

    def __init__(self, view: ControlView, rank: int, *, spin: bool) -> None:
        self._rank = rank
        self._halves = view.halves
        self._map = view.map  # keeps the addresses below valid
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(view.map))
        self._my_bell, self._my_parked = view.half(rank, BELL), view.half(rank, PARKED)
        self._bells = [view.half(r, BELL) for r in range(view.world_size)]
        self._parked = [view.half(r, PARKED) for r in range(view.world_size) if r != rank]
        self._parked_of = [view.half(r, PARKED) for r in range(view.world_size)]
        self._mine = (rank + 1, ANY_RANK)
        self.spins = self._max_spins = SPINS if spin else 1
        self.strong_order = STRONG_ORDER
        self._lock = threading.Lock()
        self._syscall = find_syscall()
        self._has_waitv = self._syscall is not None and view.world_size <= _MAX_WAITV
        self.wait_ns = 0

    # -- waking ------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Order everything before it against everything after it; see Note [fence]."""
        lock = self._lock
        lock.acquire(False)
        lock.release()
        if not STRONG_ORDER:
            lock.acquire(False)
            lock.release()

    def announce(self, words: memoryview, word: int, value: int) -> None:
        """Write one of this rank's words, and wake the ranks that sleep for it; else without a system call.

        The words of a group lie in another segment; bells and parked words are always those of the epoch.
        """
        if STRONG_ORDER:
            words[word] = value
            lock = self._lock  # `fence`, without a call
            lock.acquire(False)
            lock.release()
        else:
            self.fence()
            words[word] = value
            self.fence()
        halves, mine = self._halves, self._mine
        for parked in self._parked:
            if halves[parked] in mine:
                self.ring()
                return

    def announce_to(self, reader: int, words: memoryview, word: int, value: int) -> None:
        """Write one of this rank's words, for which only `reader` waits, and wake that one."""
        if STRONG_ORDER:
            words[word] = value
            lock = self._lock  # `fence`, without a call
            lock.acquire(False)
            lock.release()
        else:
            self.fence()
            words[word] = value
            self.fence()
        if self._halves[self._parked_of[reader]] in self._mine:
            self.ring(rank_bit(reader))

    def ring(self, bits: int = _ALL_BITS) -> None:
        """Wake all ranks that sleep for this one; with `bits` only ranks that have one of them."""
        self._halves[self._my_bell] = (self._halves[self._my_bell] + 1) & 0xFFFF_FFFF
        if self._syscall is not None:
            self._syscall(
                _SYS_FUTEX,
                ctypes.c_void_p(self._address + self._my_bell * 4),
                _WAKE,
                _ALL_WAITERS,
                None,
                None,
                ctypes.c_uint32(bits),
            )

    # -- sleeping ----------------------------------------------------------------------------------

    def spin(self, words: memoryview, word: int, target: int) -> bool:
        """Poll a word for a short while, then yield the processor; whether it reached `target`."""
        for _ in range(self.spins):
            if words[word] >= target:
                return True
        return self._yield_until(lambda: words[word] >= target)

    def spin_until(self, satisfied: Callable[[], bool]) -> bool:
        """Poll a condition for a short while, then yield the processor; whether it came true."""
        for _ in range(max(1, self.spins // 4)):
            if satisfied():
                return True
        return self._yield_until(satisfied)

    def _yield_until(self, satisfied: Callable[[], bool]) -> bool:
        """Yield the processor for a short while; whether a condition came true."""
        begin = now = time.monotonic_ns()
        yields = 0
        while now < begin + YIELD_NS:
            os.sched_yield()
            yields += 1
            if satisfied():
                self._adapt(begin, yields)
                return True
            now = time.monotonic_ns()
        self.wait_ns += now - begin
        return False

    def _adapt(self, begin: int, yields: int) -> None:
        """Spin less if it was the yield that let the peer run, else more again.

        On a busy machine two ranks may share a processor though there are enough: then a spin only keeps the
        peer from running.  A yield that let another thread run takes many times longer than one that did not.
        """
        spent = time.monotonic_ns() - begin
        self.wait_ns += spent
        if self._max_spins == 1:
            return
        if spent > yields * SWITCH_NS:
            self.spins = max(self.spins // 2, min(MIN_SPINS, self._max_spins))
        elif self.spins < self._max_spins:
            self.spins = min(self.spins * 2, self._max_spins)

    def until(
        self,
        satisfied: Callable[[], bool],
        peer: int,
        *,
        check: Callable[[], object] = bool,
        limit_ns: int = sys.maxsize,
    ) -> bool:
        """Sleep until `satisfied`, which `peer` (-1: any rank) brings about; whether it was in time.

        `check` runs before every sleep: it raises if the wait cannot succeed any more.
        """
        begin = time.monotonic_ns()
        try:
            # fault: waiting
            while not satisfied():
                check()
                left = begin + limit_ns - time.monotonic_ns()
                if left <= 0:
                    return False
                self._sleep(satisfied, peer, min(left, SLICE_NS))
            return True
        finally:
            self._halves[self._my_parked] = 0
            self.wait_ns += time.monotonic_ns() - begin

    def _sleep(self, satisfied: Callable[[], bool], peer: int, slice_ns: int) -> None:
        halves = self._halves
        halves[self._my_parked] = peer + 1 if peer >= 0 else ANY_RANK
        bells = self._bells if peer < 0 else self._bells[peer : peer + 1]
        values = [halves[bell] for bell in bells]
        self.fence()
        if not satisfied():
            self.futex_wait(bells, values, slice_ns)
        halves[self._my_parked] = 0

    def futex_wait(self, bells: Sequence[int], values: Sequence[int], slice_ns: int) -> None:
        """Sleep until one of the words has another value or the slice is over."""
        if self._syscall is None:
            time.sleep(0.0005)  # no futex here: short sleeps
        elif len(bells) == 1:
            timeout = _from_now(slice_ns)
            address = ctypes.c_void_p(self._address + bells[0] * 4)
            value, bits = ctypes.c_uint32(values[0]), ctypes.c_uint32(rank_bit(self._rank))
            self._syscall(_SYS_FUTEX, address, _WAIT, value, ctypes.byref(timeout), None, bits)
        elif self._has_waitv:
            flags_32_bits = 2
            vector = (_WaitV * len(bells))(
                *(
                    _WaitV(value, self._address + bell * 4, flags_32_bits, 0)
                    for bell, value in zip(bells, values, strict=True)
                )
            )
            timeout = _from_now(slice_ns)
            result = self._syscall(
                _SYS_FUTEX_WAITV, vector, len(bells), 0, ctypes.byref(timeout), time.CLOCK_MONOTONIC
            )
            if result < 0 and ctypes.get_errno() == _ENOSYS:
                self._has_waitv = False
        else:
            time.sleep(0.001)  # many words and no futex_waitv: short sleeps


# A forked child of a rank may be born in the middle of an operation, by a signal handler that forks and
# returns, and would go on with it: writing the rank's words, and taking the rank's part in the next one.


class ForkedWaiter(Waiter):
    """A waiter that neither waits nor wakes: it raises `ForkedRankError`."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ForkedRankError(
            f"this process was forked from rank {self._rank} in the middle of an operation, and that is the "
            "rank's"
        )

    announce = announce_to = spin = spin_until = until = _refuse

    def ring(self, bits: int = 0) -> None:
        """Do nothing."""


@dataclass(slots=True)
class WaitRecord:
    """One wait that did not end while polling: what it waits for, for errors and the rank's slot."""

    operation: Operation
    awaited: Callable[[], list[int]]
    """Returns the ranks that are still missing, by their words; empty: the wait is over."""
    explain: Callable[[list[int]], NbParallelError]
    """Returns the error when these ranks have finished the cell without doing what is waited for."""
    line: int
    any_source: bool = False
    """One of the awaited is enough."""
    robust: bool = False
    """What is waited for comes even if an awaited rank fails or dies, as long as the cell goes on."""
    peer: int = -1
    tag: int = 0
    sequence: int = 0
    target: int = 0
    deadline_ns: int | None = None
    late: str = "did not arrive"
    """What the awaited have not done, for the error when time runs out."""
    area: bytes = b""
    """Handle of the slot area of the group whose collective it is; empty: the world's."""
    inspect: Callable[[], None] | None = None
    """Called in every slice: raises if what has arrived so far is wrong already."""
    began_ns: int = field(default_factory=time.monotonic_ns)
    suspicion: object = None
    """What the last inspection saw (`DeadlockDetector`)."""
    suspected_ns: int = 0
