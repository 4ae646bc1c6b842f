"""One rank's context in an epoch: its words, its cell, its waits, and how it leaves after a failure."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nbparallel.distributed.runtime.call_site import CallSite, operation_runs
from nbparallel.distributed.runtime.failures import describe, first_failure, repeat_until_done, without_frames
from nbparallel.distributed.runtime.peer_memory import PeerMemory, publish_place
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedArrayLookup
from nbparallel.distributed.runtime.supervisor_liveness import SupervisorLiveness
from nbparallel.distributed.runtime.waiting import ForkedWaiter, Waiter, WaitRecord
from nbparallel.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    ForkedRankError,
    NbParallelError,
    PeerFailedError,
    SegmentLostError,
    rank_list,
)
from nbparallel.errors.questions import traceback_of
from nbparallel.sharing.store import Store
from nbparallel.wire.control import ControlView, State
from nbparallel.wire.control_layout import (
    DEATH,
    FAILED,
    LEFT,
    TIMING,
    TIMING_AS_OF,
    TIMING_AWAITED,
    TIMING_CELL,
    TIMING_INSIDE_WAIT,
    TIMING_WAIT,
    TIMING_WORDS,
    WRITING,
)
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.name_updates import ArrayHandle

# The other ranks of an epoch, as their words in the control segment show them (failed, died, left).


class Peers:
    """What one rank knows of the others.

    Attributes
    ----------
    ranks : tuple of int
        All ranks but this one.
    memory : PeerMemory
        Their private memory, as far as this rank can read it.
    liveness_check : SupervisorLiveness or None
        Whether death records are still written; None: ranks exit with the supervisor that writes them.
    """

    def __init__(self, view: ControlView, rank: int) -> None:
        self._view, self._words = view, view.words
        # One word of every rank: `tolist` reads 64 of them in a microsecond, a look at each takes twenty.
        self._failed, self._died, self._left = map(self._of_all, (FAILED, DEATH, LEFT))
        self.ranks = tuple(r for r in range(view.world_size) if r != rank)
        self.memory = PeerMemory(view, rank)
        self.liveness_check: SupervisorLiveness | None = None

    def _of_all(self, line: int) -> memoryview:
        """Return the first word of that line of every rank, in rank order."""
        first, size = self._view.word(0, line), self._view.world_size
        stride = self._view.word(1, line) - first if size > 1 else 1
        return self._words[first : first + size * stride : stride]

    def has_failed(self, rank: int) -> bool:
        """Whether a rank has failed or died."""
        return bool(self._failed[rank] or self._died[rank])

    def first_failure(self, ranks: Sequence[int]) -> NbParallelError | None:
        """Return the error for what went wrong first on any of `ranks`, None if nothing did."""
        if not any(self._failed.tolist()) and not any(self._died.tolist()):
            return None
        return first_failure(self._view, ranks) if any(map(self.has_failed, ranks)) else None

    def has_left(self, rank: int, cell: int) -> bool:
        """Whether a rank has left a cell."""
        return self._left[rank] >= cell

    def all_left(self, cell: int) -> list[int]:
        """Return the ranks that have left a cell."""
        return [rank for rank, last in enumerate(self._left.tolist()) if last >= cell]

    def may_still_write(self, rank: int, cell: int) -> bool:
        """Whether a rank may be writing into arrays of this one."""
        check = self.liveness_check
        return bool(
            self._words[self._view.word(rank, WRITING)]
            and not self._died[rank]
            and not self.has_left(rank, cell)
            and not (check is not None and check.vanished(rank))
        )

    def lost(self) -> NbParallelError | None:
        """Return why the death of a peer would go unnoticed from now on; None: it would not."""
        return None if self.liveness_check is None else self.liveness_check.lost()

    def close(self) -> None:
        """Release everything that refers to the control segment."""
        self.memory.close()
        for words in (self._failed, self._died, self._left):
            words.release()


# Cell state: what a rank keeps of the cell that it takes part in, and the functions that its waits call.


def _nothing(*_: object) -> None:
    """Do nothing: the default of what layers above set."""


@dataclass(slots=True)
class CellState:
    """One rank's part in one cell; `RankContext.begin_cell` makes a new one.

    Attributes
    ----------
    ranks, peers : tuple of int
        The ranks of the cell; and without this one.
    go_on : bool
        A failure only ends waits for the rank that failed.
    began_ns : int
        When it began; 0: no cell runs.
    statement, last_line : int
        First and last line of the statement that runs.
    by_item : bool
        The ranks map a function over items, each at its own.
    """

    number: int = 0
    filename: str = ""
    ranks: tuple[int, ...] = ()
    peers: tuple[int, ...] = ()
    go_on: bool = False
    began_ns: int = 0
    statement: int = 0
    last_line: int = 0
    by_item: bool = False

    def not_whole(self, world_size: int) -> Exception:
        """Return why an operation on the world cannot begin here."""
        if self.by_item:
            return RuntimeError(
                "the ranks of `map` are at items of their own, so that an operation between them would wait "
                "for ranks that never call it, or combine items that happen to meet: return a value for each "
                "item, and combine the list that `map` returns"
            )
        missing = [rank for rank in range(world_size) if rank not in self.ranks]
        verb = "is" if len(missing) == 1 else "are"
        return ValueError(
            f"{rank_list(missing)} {verb} not in this cell, and an operation on the world needs all ranks"
        )

    def how_gone(self, rank: int, what: str) -> str:
        """Return why a rank that does nothing more will not receive something, as the end of a sentence."""
        if rank in self.ranks:
            return f"finished the cell without receiving {what}"
        return f"is not in this cell, and cannot receive {what}"


_NO_TIMING = memoryview(bytes(8 * (TIMING_WORDS - 1))).cast("Q")
SILENCE_NS = 1_000_000_000
"""How long a peer may go on writing into this rank's memory before it is named."""
LOSS_NS = 500_000_000
"""How long a death record may take to appear after the memory of the dead rank was missed."""


class RankContext:
    """One rank in one epoch: what all its operations share.

    What every operation reads or writes are attributes of the context itself; what concerns the cell and the
    other ranks is grouped (`cell`, `peers`).

    Attributes
    ----------
    forked : bool
        This is a copy in a forked child, in which no operation is possible.
    ready : bool
        An operation may begin.
    whole, plain : bool
        The cell runs on all ranks; and no collective of the world was begun and not ended.
    open : int
        The collective that this rank has begun and not ended: an exception now invalidates the epoch.
    exposed : bool
        Peers may write into this rank's arrays.
    operations, nbytes : int
        How many operations this rank has ended in this epoch, and the bytes that they moved.  One that is
        made of others counts as those: the tracer counts what users call.
    former_wait_ns : int
        How long this rank had waited when the operation began that it is in.
    cause : BaseException or None
        Why the epoch is invalid.
    remark : str
        What the error about a deadlock adds: messages that were dropped at the end of the last cell.
    place : WorldPlace
        Which ranks are on this machine.
    mail : object or None
        What messages to ranks elsewhere need.
    call_site : CallSite
        Finds the cell's line that is being executed.
    waiting : WaitRecord or None
        The wait that this rank's slot shows.
    progress, diagnose
        Of the layers above, called in every slice of a wait: goes on with what other ranks need of this one;
        raises if the wait is part of a deadlock.
    waited
        Called at the end of every wait, with the rank that was waited for.
    """

    def __init__(
        self,
        view: ControlView,
        rank: int,
        world_size: int,
        store: Store,
        *,
        epoch: int,
        usable_cpus: int,
        place: WorldPlace | None = None,
    ) -> None:
        self.view, self.words = view, view.words
        self.rank, self.world_size = rank, world_size
        self.place = place or WorldPlace(world_size)
        self.waiter = Waiter(view, rank, spin=world_size <= usable_cpus)
        self.memory = SharedArrayLookup(store, self.attach)
        self.store = store
        self.peers = Peers(view, rank)
        self.progress: Callable[[], object] = _nothing
        self.diagnose: Callable[[WaitRecord], object] = _nothing
        self.waited: Callable[[WaitRecord, int], object] = _nothing
        self.cell = CellState()
        self.call_site = CallSite()
        self.writing = view.word(rank, WRITING)
        self.ready = self.whole = self.plain = self.exposed = self.forked = False
        self.open = self.nbytes = self.private_nbytes = self.operations = 0
        self.cause: BaseException | None = None
        self.remark = ""
        self.mail = self.place.mail(self)
        self.timing = view.word(rank, TIMING)
        self.former_wait_ns = self._cells_wait_ns = 0
        self.waiting: WaitRecord | None = None

    # -- cells ---------------------------------------------------------------------------------------

    def begin_cell(
        self, cell: int, participants: tuple[int, ...], filename: str, *, go_on: bool = False
    ) -> None:
        """Take part in `cell` from now on; with `go_on` a failure only ends waits for its rank."""
        peers = tuple(r for r in participants if r != self.rank)
        self.cell = CellState(cell, filename, tuple(participants), peers, go_on, time.monotonic_ns())
        self.whole = self.plain = len(participants) == self.world_size
        self.call_site = CallSite(filename)
        self.call_site.entered = partial(publish_place, self.view, self.rank, cell)
        self.former_wait_ns = self._cells_wait_ns = self.waiter.wait_ns
        self.words[self.timing + 1 : self.timing + TIMING_WORDS] = _NO_TIMING
        self.words[self.timing + TIMING_CELL] = cell
        self.view.write_slot(self.rank, cell, State.COMPUTING)
        self.open = 0
        self.ready = self.cause is None

    def begin_items(self) -> None:
        """Refuse operations of several ranks until the cell ends: each rank is at an item of its own."""
        self.cell.by_item = True
        self.whole = self.plain = False

    def at_line(self, line: int, last_line: int = 0) -> None:
        """Publish which statement of the cell runs: the error about this process's death names it."""
        self.cell.statement, self.cell.last_line = line, last_line
        self.view.write_slot(self.rank, self.cell.number, State.COMPUTING, line=line, last_line=last_line)

    def end_cell(self, failure: BaseException | None) -> None:
        """Leave the cell; ranks that wait for this one in it are released with an error."""
        if self.forked:
            return  # the words are the rank's, and this is not the rank
        cell = self.cell
        self.ready = False
        if failure is not None:
            kind, origin, text = describe(failure, self.rank, self.call_site, in_operation=False)
            self.view.write_failure(self.rank, kind, cell.number, origin, text)
            if self.cause is None:  # no `or`: the user's class may define `__bool__`
                self.cause = failure
        self.words[self.writing] = 0
        self.memory.forget()
        self.write_timing()
        cell.began_ns = cell.statement = cell.last_line = 0
        state = State.FINISHED if failure is None else State.FAILED
        self.view.write_slot(self.rank, cell.number, state)
        self.waiter.announce(self.words, self.view.word(self.rank, LEFT), cell.number)
        self.waiter.ring()

    def forget_frames(self) -> None:
        """Keep only the message of a failure, for `refuse`: its frames hold the cell's arrays."""
        cause = self.cause
        if cause is not None and traceback_of(cause) is not None:
            self.cause = without_frames(cause, self.rank)

    def close(self) -> None:
        """Release everything that refers to this object, so that the segment is unmapped immediately."""
        self.ready = False
        self.progress = self.diagnose = self.waited = _nothing
        self.memory.close()
        self.peers.close()

    @property
    def wait_ns(self) -> int:
        """How long this rank has waited for others in its cell."""
        return self.waiter.wait_ns - self._cells_wait_ns

    def write_timing(self) -> None:
        """Publish how long this rank has waited, for readers that may find its slot unchanged."""
        words, w = self.words, self.timing
        words[w + TIMING_AS_OF] = time.monotonic_ns()
        wait_ns = self.waiter.wait_ns
        words[w + TIMING_WAIT] = wait_ns - self._cells_wait_ns
        words[w + TIMING_INSIDE_WAIT] = max(0, wait_ns - self.former_wait_ns)

    # -- refusing --------------------------------------------------------------------------------------

    def refuse(self, *, world: bool) -> None:
        """Raise why no operation can begin now; nothing if one can."""
        if self.forked:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from rank {self.rank}, which alone may talk to "
                "the other ranks; send results back through a pipe or a file"
            )
        if not self.ready and self.cause is None and self.cell.began_ns and not operation_runs():
            self.failed(RuntimeError("a signal handler raised while an operation was failing"))
        if self.cause is not None:
            cause = self.cause
            text = str(cause) or type(cause).__name__
            message = f"no operation between ranks is possible until the next cell, since: {text}"
            kind = type(cause) if isinstance(cause, NbParallelError) else PeerFailedError
            if isinstance(cause, PeerFailedError) or kind is PeerFailedError:
                raise PeerFailedError(message, rank=getattr(cause, "rank", self.rank)) from cause
            raise kind(message) from cause
        if not self.cell.began_ns:
            raise RuntimeError("operations between ranks work only while a cell runs")
        if not self.ready:
            raise RuntimeError(
                f"rank {self.rank} is inside an operation already, in another thread or a signal handler: "
                "one at a time"
            )
        if world and not self.whole:
            self.place.check_reach(range(self.world_size), "an operation on the world that is called")
            raise self.cell.not_whole(self.world_size)

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, satisfied: Callable[[], bool], peer: int, wait: WaitRecord) -> None:
        """Wait until `satisfied`; raises if that has become impossible."""
        try:
            self.show(wait)
            self.waiter.until(satisfied, peer, check=lambda: self.check(wait))
        finally:
            # Before anything acts on what came: a rank that is stopped between the two must not look as if it
            # still waited for what it has already taken (a deadlock would be seen where none is).
            if not self.forked:
                self.write_timing()
                self.show(None)
                self.waited(wait, peer)

    def show(self, wait: WaitRecord | None) -> None:
        """Publish that this rank is in a wait; None: it computes."""
        self.waiting, cell = wait, self.cell
        if wait is None:
            self.at_line(cell.statement, cell.last_line)
            return
        self.view.write_slot(
            self.rank, cell.number, State.WAITING, wait.operation, sequence=wait.sequence, peer=wait.peer,
            tag=wait.tag, line=wait.line, deadline=wait.deadline_ns is not None, target=wait.target,
            area=wait.area,
        )  # fmt: skip

    def check(self, wait: WaitRecord) -> None:
        """Raise if `wait` cannot succeed; and go on with what other ranks need of this one."""
        if self.check_alone(wait):
            self.progress()
            if self.waiting is not wait:  # it has computed, or waited for something else
                self.show(wait)
            self.diagnose(wait)

    def check_alone(self, wait: WaitRecord) -> bool:
        """Raise if a peer's end or the deadline ends `wait`; whether more checks make sense."""
        peers = self._concerning(wait)
        if wait.area:
            self._publish_awaited(wait)
        opened = self.open
        try:
            self.check_peers(peers)
        except NbParallelError:
            if wait.awaited():
                raise
            self.open = opened  # what is waited for came first: the peer that brought it may fail afterwards
            return False
        lost = self.peers.lost()
        if lost is not None:
            raise self.mark_failed(lost)
        left, cell = self.peers.all_left(self.cell.number), self.cell
        if left or len(cell.ranks) < self.world_size:
            # A rank writes its words before it ends a cell, so inspect again what is missing now.
            missing = wait.awaited()
            finished = [r for r in missing if r in left or r not in cell.ranks]
            if finished and (not wait.any_source or len(finished) == len(missing)):
                self.check_peers(peers)  # a rank that failed wrote so before it left: that is the reason then
                raise self.mark_failed(wait.explain(finished))
        if wait.inspect is not None:
            wait.inspect()
        if wait.deadline_ns is not None and time.monotonic_ns() >= wait.deadline_ns:
            missing = wait.awaited()
            if missing:
                seconds = (time.monotonic_ns() - wait.began_ns) / 1e9
                call = f"{wait.operation.name}{self.call_site.place(wait.line)}"
                raise CollectiveTimeoutError(
                    f"{call}: timed out after {seconds:.1f} s; {rank_list(missing)} {wait.late}"
                )
        return True

    def _publish_awaited(self, wait: WaitRecord) -> None:
        """Publish the ranks that are missing in a group: only its members know its slots."""
        missing = (1 << rank for rank in wait.awaited() if rank < 64)
        self.words[self.timing + TIMING_AWAITED] = sum(missing)

    def _concerning(self, wait: WaitRecord) -> Sequence[int]:
        """Return the ranks whose failure ends a wait: all or, in a cell that goes on, those awaited."""
        if not self.cell.go_on:
            return self.cell.peers
        if wait.robust:
            return ()
        awaited = wait.awaited()
        failed = list(filter(self.peers.has_failed, awaited))
        return failed if not wait.any_source or len(failed) == len(awaited) else ()

    def check_peers(self, peers: Sequence[int] | None = None) -> None:
        """Raise if a peer failed or died: one of `peers`, by default any of the cell."""
        error = self.peers.first_failure(self.cell.peers if peers is None else peers)
        if error is not None:
            raise self.mark_failed(error)

    def attach(self, handle: ArrayHandle, *, writable: bool) -> AnyArray:
        """Return another rank's array; raises `PeerFailedError` if it is lost because that rank died."""
        try:
            return self.store.attach(handle, writable=writable)
        except SegmentLostError:
            self.await_failure()  # the memory is freed with its owner
            raise

    def await_failure(self, peers: Sequence[int] | None = None) -> None:
        """Raise what has happened to a peer whose memory is gone; returns if it is not recorded in time."""
        limit = time.monotonic_ns() + LOSS_NS
        while time.monotonic_ns() < limit:
            self.check_peers(peers)
            time.sleep(0.001)

    def gone(self, rank: int) -> bool:
        """Whether `rank` will do nothing more in this cell."""
        return self.peers.has_left(rank, self.cell.number) or rank not in self.cell.ranks

    def deadlock(self, text: str) -> DeadlockError:
        """Return the error about a wait that can never end."""
        return DeadlockError(f"{text}{self.remark}")

    def mark_failed(self, error: NbParallelError) -> NbParallelError:
        """Record that `error` invalidates the epoch, even outside a collective; returns it."""
        self.open = self.open or -1
        return error

    def forked_copy(self) -> RankContext:
        """Make this forked child's copy of a context inert; returns that for operations that begin later.

        It is another object because the operation that the child was born into holds this one, and marks it
        as ready when it ends.  The waiter changes its class because every object of the operations holds it,
        and a check for each word that is announced would cost each operation of each rank.
        """
        self.forked, self.ready = True, False
        self.waiter.__class__ = ForkedWaiter
        return copy.copy(self)

    # -- leaving after a failure ---------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """End an operation that raised `error`; returns when no peer can write into its arrays any more.

        An error before any peer was notified (a wrong argument) leaves the epoch as it is.
        """
        if self.forked:
            return  # a child that was forked in the middle of it: the operation is the rank's
        # No second interrupt and no other handler may cut this short: the peer that is named would write into
        # memory that the user believes to be free.  The kernel's escalation kills a rank that is silent.
        repeat_until_done(lambda: self._fail(error))

    def _fail(self, error: BaseException) -> None:
        if self.open == 0 and issubclass(type(error), Exception):
            self.ready = self.cause is None
        else:
            self._leave(error)

    def _leave(self, error: BaseException) -> None:
        self.ready = False
        if self.cause is None:
            self.cause = error
        cell = self.cell
        kind, origin, text = describe(error, self.rank, self.call_site, in_operation=True)
        self.view.write_failure(self.rank, kind, cell.number, origin, text)
        self.words[self.writing] = 0
        # fault: leave
        self.waiter.fence()  # this rank's failure is written before peers' words are read: see `may_write`
        self.waiter.ring()
        if self.exposed:
            self._wait_for_writers()
            self.exposed = False
        self.open = 0

    def may_write(self, operation: int, peers: Sequence[int]) -> None:
        """Announce that this rank writes into arrays of `peers`, unless one of them has failed.

        Both sides write, fence, read: either this rank sees that a peer has failed and does not write, or
        that peer sees it writing and waits.
        """
        self.words[self.writing] = operation
        self.waiter.fence()
        self.check_peers(peers)

    def _wait_for_writers(self) -> None:
        begin, cell = time.monotonic_ns(), self.cell.number
        named = False
        for peer in self.peers.ranks:
            while self.peers.may_still_write(peer, cell):
                time.sleep(0.0005)
                if not named and time.monotonic_ns() - begin > SILENCE_NS:
                    named = True
                    self.view.write_slot(self.rank, cell, State.LEAVING, peer=peer)
                    sys.stderr.write(
                        f"rank {self.rank} waits: rank {peer} may still write into its arrays and does not "
                        "answer (stopped, or inside a long computation)\n"
                    )
                    sys.stderr.flush()


class Exposure:
    """Within it peers may write into this rank's arrays; after a failure they may still, behind it."""

    __slots__ = ("_context",)

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.exposed = True

    def __exit__(self, kind: object, *_: object) -> None:
        # With no collective open all members have ended it alike, before any of them wrote.
        if kind is None or not self._context.open:
            self._context.exposed = False
