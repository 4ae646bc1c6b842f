"""Member: one rank's place in an epoch: its words, its cell, how it waits, how it leaves after a failure."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.call_site import CallSite
from nbparallel.distributed.runtime.failures import describe, first_failure, without_frames
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedArrayLookup
from nbparallel.distributed.runtime.supervisor_liveness import LivenessCheck
from nbparallel.distributed.runtime.waiting import Waiter, WaitRecord
from nbparallel.errors import (
    CollectiveTimeoutError,
    ForkedRankError,
    NbParallelError,
    PeerFailedError,
    SegmentLostError,
    rank_list,
)
from nbparallel.sharing.store import Store
from nbparallel.wire.control import ControlView, State
from nbparallel.wire.handles import ArrayHandle

SILENCE_NS = 1_000_000_000
"""After this a peer that still writes into our memory is named."""
LOSS_NS = 500_000_000
"""How long a death may take to be known after the memory of the dead was missed."""


def _nothing(*_: object) -> None:
    """Stand in for what other modules plug in."""


class RankContext:
    """One rank in one epoch.

    Attributes
    ----------
    inert, ready : bool
        This is a forked child; all that an operation looks at before it begins.
    whole, plain : bool
        The cell runs on all ranks; and no collective of the world was begun and not ended.
    open : int
        The collective that this rank has begun and not ended: an exception now voids the epoch.
    exposed : bool
        Peers may write into this rank's arrays.
    cause : BaseException or None
        Why the epoch is void.
    calling : CallingLine
        Finds the cell's line that is being executed.
    """

    inert = False

    def __init__(
        self,
        view: ControlView,
        rank: int,
        world_size: int,
        store: Store,
        *,
        epoch: int,
        usable_cpus: int,
    ) -> None:
        if world_size != view.world_size or epoch != view.epoch:
            raise ValueError(
                f"the control segment is for {view.world_size} ranks in epoch {view.epoch}, "
                f"not for {world_size} in epoch {epoch}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0-{world_size - 1}")
        self.view, self.rank, self.world_size, self.epoch = view, rank, world_size, epoch
        self.words, self.octets = view.words, view.octets
        self.waiter = Waiter(view, rank, spin=world_size <= usable_cpus)
        self.memory = SharedArrayLookup(store, self.attach)
        self.store = store
        self.others = tuple(r for r in range(world_size) if r != rank)
        self.writing = view.word_writing(rank)
        self.cell, self.filename = 0, ""
        self.participants: tuple[int, ...] = ()
        self.peers: tuple[int, ...] = ()
        self.ready = self.whole = self.plain = self.exposed = False
        self.open = 0
        self.cause: BaseException | None = None
        self.progress: Callable[[], None] = _nothing
        self.diagnose: Callable[[WaitRecord], None] = _nothing
        self.waited: Callable[[WaitRecord, int], None] = _nothing  # hears of every wait that has ended
        self.nbytes = self.operations = 0
        self.liveness_check: LivenessCheck | None = None
        self.call_site = CallSite()
        self._began_ns = self._past_ns = 0
        self._go_on = self._forked = False

    # -- cells ---------------------------------------------------------------------------------------

    def begin_cell(
        self, cell: int, participants: tuple[int, ...], filename: str, *, go_on: bool = False
    ) -> None:
        """Take part in `cell` from now on; with `go_on` a failure only concerns who waits for its rank."""
        if self.rank not in participants:
            raise ValueError(f"rank {self.rank} is not among the cell's ranks {participants}")
        self.cell, self.participants, self.filename = cell, tuple(participants), filename
        self.peers = tuple(r for r in participants if r != self.rank)
        self.whole = self.plain = len(self.participants) == self.world_size
        self._go_on = go_on
        self.call_site = CallSite(filename)
        self._began_ns = time.monotonic_ns()
        self._statement = 0
        self.view.write_slot(self.rank, cell, State.COMPUTING)
        self.open = 0
        self.ready = self.cause is None

    def at_line(self, line: int) -> None:
        """Publish which statement of the cell runs, for who looks when this process has died."""
        self._statement = line
        self.view.write_slot(self.rank, self.cell, State.COMPUTING, line=line)

    def end_cell(self, failure: BaseException | None) -> None:
        """Leave the cell; whoever waits for this rank in it is freed."""
        if self._forked:
            return  # the words are the rank's, and this is not the rank
        self.ready = False
        if failure is not None:
            kind, origin, text = describe(failure, self.rank, self.filename, in_operation=False)
            self.view.write_failure(self.rank, kind, self.cell, origin, text)
            self.cause = self.cause or failure
        self.words[self.writing] = 0
        self.memory.forget()
        self.write_timing()
        self._past_ns += time.monotonic_ns() - self._began_ns
        self._began_ns = 0
        self._statement = 0
        state = State.FINISHED if failure is None else State.FAILED
        self.view.write_slot(self.rank, self.cell, state)
        self.waiter.announce(self.words, self.view.word_left(self.rank), self.cell)
        self.waiter.ring()

    def forget_frames(self) -> None:
        """Keep of a failure only what `refuse` says of it: its frames hold the cell's arrays."""
        cause = self.cause
        if cause is not None and cause.__traceback__ is not None:
            self.cause = without_frames(cause, self.rank)

    def close(self) -> None:
        """Let go of everything that refers back here, so that the segment is unmapped at once."""
        self.ready = False
        self.memory.close()
        self.progress = _nothing
        self.diagnose = self.waited = _nothing

    def write_timing(self) -> None:
        """Publish where the time went."""
        w, words = self.view.word_timing(self.rank), self.words
        now = time.monotonic_ns() - self._began_ns if self._began_ns else 0
        words[w] = max(0, self._past_ns + now - self.waiter.wait_ns)
        words[w + 1], words[w + 2], words[w + 3] = self.waiter.wait_ns, self.nbytes, self.operations

    # -- refusing --------------------------------------------------------------------------------------

    def refuse(self, *, world: bool) -> None:
        """Raise why no operation can begin now; nothing if one can."""
        if self._forked:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from rank {self.rank}, which alone may talk to "
                "the other ranks; send results back through a pipe or a file"
            )
        if self.cause is not None:
            cause = self.cause
            text = str(cause) or type(cause).__name__
            message = f"no operation between ranks is possible until the next cell, since: {text}"
            kind = type(cause) if isinstance(cause, NbParallelError) else PeerFailedError
            if isinstance(cause, PeerFailedError) or kind is PeerFailedError:
                raise PeerFailedError(message, rank=getattr(cause, "rank", self.rank)) from cause
            raise kind(message) from cause
        if not self._began_ns:
            raise RuntimeError("operations between ranks work only while a cell runs")
        if not self.ready:
            raise RuntimeError(
                f"rank {self.rank} is inside an operation already, in another thread or a signal handler: "
                "one at a time"
            )
        if world and not self.whole:
            missing = [r for r in range(self.world_size) if r not in self.participants]
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(
                f"{rank_list(missing)} {verb} not in this cell, and an operation on the world needs all ranks"
            )

    def forked(self) -> None:
        """Become inert; see `forked.make_inert`."""
        self._forked = True
        self.ready = False

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, satisfied: Callable[[], bool], peer: int, wait: WaitRecord) -> None:
        """Wait until `satisfied`; raises if that cannot come any more."""
        view, rank, cell = self.view, self.rank, self.cell
        view.write_slot(
            rank, cell, State.WAITING, wait.operation, sequence=wait.sequence, peer=wait.peer,
            tag=wait.tag, line=wait.line, deadline=wait.deadline_ns is not None, target=wait.target,
            area=wait.area,
        )  # fmt: skip
        try:
            self.waiter.until(satisfied, peer, check=lambda: self.check(wait))
        finally:
            # Before anything acts on what came: a rank that is stopped between the two must not look as if
            # it still waited for what it has already taken (a deadlock would be seen where none is).
            if not self._forked:
                view.write_slot(rank, cell, State.COMPUTING, line=self._statement)
                self.write_timing()
                self.waited(wait, peer)

    def check(self, wait: WaitRecord) -> None:
        """Raise if `wait` cannot end well; meanwhile, go on with what others need of this rank."""
        if self.check_alone(wait):
            self.progress()
            self.diagnose(wait)

    def check_alone(self, wait: WaitRecord) -> bool:
        """Raise if somebody's end or the time ends `wait`; whether it is worth more looks."""
        peers = self._concerning(wait)
        opened = self.open
        try:
            self.check_peers(peers)
        except NbParallelError:
            if wait.awaited():
                raise
            self.open = opened  # what is waited for came first: who brought it may fail on its own then
            return False
        lost = None if self.liveness_check is None else self.liveness_check.lost()
        if lost is not None:
            raise self.doom(lost)
        left = [r for r in self.others if self.gone(r)]
        if left:
            # Their last words were written before they left, so look again at what is missing now.
            missing = wait.awaited()
            finished = [r for r in missing if r in left]
            if finished and (not wait.any_source or len(finished) == len(missing)):
                self.check_peers(peers)  # whoever failed said so before it left: that is the reason then
                raise self.doom(wait.explain(finished))
        if wait.inspect is not None:
            wait.inspect()
        if wait.deadline_ns is not None and time.monotonic_ns() >= wait.deadline_ns:
            missing = wait.awaited()
            if missing:
                seconds = (time.monotonic_ns() - wait.began_ns) / 1e9
                raise CollectiveTimeoutError(
                    f"{wait.operation.name} on line {wait.line}: time ran out after {seconds:.1f} s; "
                    f"{rank_list(missing)} did not arrive"
                )
        return True

    def _concerning(self, wait: WaitRecord) -> Sequence[int]:
        """Return whose failure ends a wait: anybody's or, in a cell that goes on, theirs who are awaited."""
        if not self._go_on:
            return self.peers
        awaited = wait.awaited()
        words, view = self.words, self.view
        failed = [r for r in awaited if words[view.word_failed(r)] or words[view.word_death(r)]]
        return failed if not wait.any_source or len(failed) == len(awaited) else ()

    def check_peers(self, peers: Sequence[int] | None = None) -> None:
        """Raise if a peer failed or died: one of `peers`, by default any."""
        peers = self.peers if peers is None else peers
        words, view = self.words, self.view
        if any(words[view.word_failed(r)] or words[view.word_death(r)] for r in peers):
            error = first_failure(view, peers)
            if error is not None:
                raise self.doom(error)

    def attach(self, handle: ArrayHandle, *, writable: bool) -> AnyArray:
        """Return another rank's array; if its memory is gone because that rank died, say so."""
        try:
            return self.store.attach(handle, writable=writable)
        except SegmentLostError:
            # The memory goes with its owner, and the supervisor's word may come a moment later.
            limit = time.monotonic_ns() + LOSS_NS
            while time.monotonic_ns() < limit:
                self.check_peers()
                time.sleep(0.001)
            raise

    def gone(self, rank: int) -> bool:
        """Whether `rank` will do nothing more in this cell."""
        return rank not in self.participants or self.words[self.view.word_left(rank)] >= self.cell

    def doom(self, error: NbParallelError) -> NbParallelError:
        """Mark that `error` voids the epoch, even outside a collective."""
        self.open = self.open or -1
        return error

    # -- leaving after a failure ---------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """End an operation that raised `error`; returns when no peer can write into our arrays any more.

        An error before anything was said to anybody (a wrong argument) leaves the epoch as it is.
        """
        if self._forked:
            return  # a child that was forked in the middle of it: the operation is the rank's
        if self.open == 0 and isinstance(error, Exception):
            self.ready = self.cause is None
            return
        while True:
            try:
                self._leave(error)
                return
            except KeyboardInterrupt:
                # A second interrupt may not cut this short: the peer that is named would write into memory
                # that the user believes to be free.  The kernel's ladder ends whoever does not answer.
                continue

    def _leave(self, error: BaseException) -> None:
        self.ready = False
        if self.cause is None:
            self.cause = error
        kind, origin, text = describe(error, self.rank, self.filename, in_operation=True)
        self.view.write_failure(self.rank, kind, self.cell, origin, text)
        self.words[self.writing] = 0
        if fault_injection.ARMED:
            fault_injection.hit("leave", self.rank)
        self.waiter.fence()  # ours is written before theirs is read: see `may_write`
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
        begin = time.monotonic_ns()
        named = False
        for peer in self.others:
            while self._still_writes(peer):
                time.sleep(0.0005)
                if not named and time.monotonic_ns() - begin > SILENCE_NS:
                    named = True
                    self.view.write_slot(self.rank, self.cell, State.LEAVING, peer=peer)
                    sys.stderr.write(
                        f"rank {self.rank} waits: rank {peer} may still write into its arrays and does not "
                        "answer (stopped, or inside a long computation)\n"
                    )
                    sys.stderr.flush()

    def _still_writes(self, peer: int) -> bool:
        view, words = self.view, self.words
        return bool(
            words[view.word_writing(peer)]
            and not words[view.word_death(peer)]
            and words[view.word_left(peer)] < self.cell
            and not (self.liveness_check is not None and self.liveness_check.vanished(peer))
        )
