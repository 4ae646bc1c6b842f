"""Ranks without a session: forked processes over one control segment, for tests of the operations.

The caller plays the supervisor: it reaps the processes it forked, writes their death words, and ends what
is left when the watchdog's time is up (after their stacks were dumped), by the process ids that it holds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nbparallel.distributed import Communicator, set_current
from nbparallel.distributed.collectives.group_collectives import GroupCollectives, GroupTable
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.tracing import OperationTracer
from nbparallel.errors import SegmentLostError
from nbparallel.sharing.store import Store
from nbparallel.supervisor.children import die_with_parent
from nbparallel.wire import control
from nbparallel.wire.control import ControlView
from nbparallel.wire.segments import Forget, FramePayload, Notice, Register
from tests.harness import fault_injection

if TYPE_CHECKING:
    from nbparallel.multiprocessing.pool import Pool
    from nbparallel.session import Session
    from nbparallel.session.processes.rank_pool import RankPool


class FolderBroker:
    """A segment broker without a supervisor: a folder says which process holds which segment's descriptor."""

    def __init__(self, folder: str, client: int) -> None:
        self.client = client
        self._folder = Path(folder)
        self._fds: dict[int, int] = {}

    def send(self, message: FramePayload, fd: int | None = None) -> None:
        """Keep a descriptor for others, or drop it; nothing else is counted here, and all may write."""
        if isinstance(message, Register) and fd is not None:
            self._fds[message.segment] = os.dup(fd)
            draft = self._folder / f"{message.segment}.{os.getpid()}"
            draft.write_text(f"/proc/{os.getpid()}/fd/{self._fds[message.segment]}")
            draft.rename(self._folder / str(message.segment))
        elif isinstance(message, Forget) and (kept := self._fds.pop(message.segment, None)) is not None:
            os.close(kept)

    def fetch(self, segment: int, *, writable: bool, memory: int = 0) -> int:
        """Open another process's descriptor."""
        try:
            path = (self._folder / str(segment)).read_text()
            return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SegmentLostError(f"segment {segment} is gone") from None

    def notices(self) -> Sequence[Notice]:
        """Return nothing: no segment is ever idle here."""
        return ()


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    value: Any
    error: BaseException | None
    error_ns: int
    """`time.monotonic_ns` when the error left the rank's function."""
    signal: int | None
    """What killed it, None if it lived to the end."""
    death_ns: int
    """When its death word was written."""


@dataclass(slots=True)
class Running:
    """Ranks under way, for a test that interferes."""

    pids: list[int]
    view: ControlView
    started_ns: int


class RanksHungError(AssertionError):
    """The watchdog's time was up; the message holds every rank's slot."""


def context_of(communicator: Communicator) -> RankContext:
    """Return what all operations of a rank share: its store, its words, its counters.

    For tests of the operations themselves; its attributes change from version to version.
    """
    return communicator._context


class CommunicatorParts(NamedTuple):
    """What the operations of a rank are made of, besides `context_of`."""

    collectives: GroupCollectives
    """Those of the world."""
    groups: GroupTable
    sender: Sender
    receiver: Receiver
    tracer: OperationTracer | None
    """What notes its operations; None: nothing does."""


def parts_of(communicator: Communicator) -> CommunicatorParts:
    """Return what a rank's operations are made of; for tests of them, as `context_of`."""
    c = communicator
    return CommunicatorParts(c._world, c._group_table, c._sender, c._receiver, c._tracer)


def wrap_collectives(communicator: Communicator, around: Callable[..., Any]) -> None:
    """Have ``around(run, *args)`` run each blocking collective of a rank; operations of several steps too.

    It calls ``run(*args)``, and does before or after it what a test needs at that moment.
    """
    communicator._run = partial(around, communicator._run)  # type: ignore[method-assign]


def run_ranks(
    world_size: int,
    function: Callable[[Communicator], Any],
    *,
    seconds: float = 20.0,
    usable_cpus: int | None = None,
    faults: str | None = None,
    participants: Sequence[int] | None = None,
    meanwhile: Callable[[Running], bool] | None = None,
    write_deaths: bool = True,
) -> list[RankOutcome]:
    """Run ``function(communicator)`` on forked ranks, in one cell, and return how each ended.

    Parameters
    ----------
    seconds : float
        The watchdog's time.
    faults : str, optional
        A fault as `fault_injection.arm` takes it.
    participants : sequence of int, optional
        The cell's ranks; the others only exist.
    meanwhile : callable, optional
        Called again and again while ranks run; True: call no more.
    """
    ranks = tuple(participants) if participants is not None else tuple(range(world_size))
    cpus = usable_cpus if usable_cpus is not None else len(os.sched_getaffinity(0))
    fd = control.create(world_size, 1, label="test")
    if faults is not None:
        fault_injection.marked_modules()
    with (
        tempfile.TemporaryDirectory(prefix="nbp-ranks-") as folder,
        contextlib.closing(ControlView(fd)) as view,
        _children(world_size, ranks, function, fd, folder, cpus, faults) as (pids, pipes),
    ):
        running = Running([pids[r] for r in ranks], view, time.monotonic_ns())
        return _collect(ranks, pids, pipes, view, seconds, meanwhile, running, write_deaths=write_deaths)


@contextlib.contextmanager
def _children(
    world_size: int,
    ranks: Sequence[int],
    function: Callable[[Communicator], Any],
    fd: int,
    folder: str,
    cpus: int,
    faults: str | None,
) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    pids: dict[int, int] = {}
    pipes: dict[int, int] = {}
    stay, go = os.pipe()
    parent = os.getpid()
    # A cell is what can be interrupted, as on a real rank: not the start before it, nor the end after it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for rank in ranks:
            reader, writer = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # the test process may have threads
                pid = os.fork()
            if pid == 0:
                os.close(go)
                os.close(reader)
                _child(
                    rank, world_size, tuple(ranks), function, fd, folder, cpus, faults, writer, stay, parent
                )
            pids[rank], pipes[rank] = pid, reader
            os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pids, pipes
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(fd)
        os.close(stay)
        os.close(go)  # ranks that have ended their function leave now
        _reap(pids)
        for reader in pipes.values():
            os.close(reader)


def _child(
    rank: int,
    world_size: int,
    ranks: tuple[int, ...],
    function: Callable[[Communicator], Any],
    fd: int,
    folder: str,
    cpus: int,
    faults: str | None,
    writer: int,
    stay: int,
    parent: int,
) -> None:
    """Be a rank; never returns."""
    try:
        die_with_parent(parent)  # a test run that is killed writes no death words: ranks would wait forever
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        fault_injection.arm(faults, rank)
        if (torch := sys.modules.get("torch")) is not None:
            # A pool of threads that OpenMP made in the test's process is not here: torch would wait for it.
            torch.set_num_threads(1)
        store = Store(rank + 1)
        store.connect(FolderBroker(folder, rank + 1))
        communicator = Communicator(fd, rank, world_size, store, epoch=1, usable_cpus=cpus)
        set_current(communicator)
        communicator.begin_cell(1, ranks, function.__code__.co_filename)
        value, error = None, None
        try:
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                value = function(communicator)
                communicator.finish_cell()
            except BaseException as caught:  # noqa: BLE001 - it is what the test wants to see
                error = caught
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        except KeyboardInterrupt as late:  # another signal, behind the end of the function or its error
            error = error or late
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        error_ns = time.monotonic_ns()
        communicator.end_cell(error)
        try:
            data = pickle.dumps((value, error, error_ns))
        except Exception as caught:  # noqa: BLE001
            data = pickle.dumps((None, RuntimeError(f"{error!r} {value!r}: {caught!r}"), error_ns))
        view = memoryview(len(data).to_bytes(8, "little") + data)
        while view:
            view = view[os.write(writer, view) :]
        select.select([stay], [], [], 60)  # the process lives on after its cell, as a rank's does
    except BaseException:  # noqa: BLE001 - nothing may unwind into the test runner's copy here
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _collect(
    ranks: Sequence[int],
    pids: dict[int, int],
    pipes: dict[int, int],
    view: ControlView,
    seconds: float,
    meanwhile: Callable[[Running], bool] | None,
    running: Running,
    *,
    write_deaths: bool,
) -> list[RankOutcome]:
    limit = time.monotonic() + seconds
    found: dict[int, RankOutcome] = {}
    data: dict[int, bytes] = dict.fromkeys(ranks, b"")
    open_pipes = {pipes[r]: r for r in ranks}
    while len(found) < len(ranks):
        if time.monotonic() > limit:
            _dump(pids, view, seconds)
        if meanwhile is not None and meanwhile(running):
            meanwhile = None
        ready, _, _ = select.select(list(open_pipes), [], [], 0.002)
        for reader in ready:
            rank = open_pipes[reader]
            part = os.read(reader, 1 << 20)
            data[rank] += part
            received = data[rank]
            if len(received) >= 8 and len(received) - 8 == int.from_bytes(received[:8], "little"):
                value, error, error_ns = pickle.loads(received[8:])
                found[rank] = RankOutcome(rank, value, error, error_ns, None, 0)
                del open_pipes[reader]
            elif not part:
                del open_pipes[reader]
                _, status = os.waitpid(pids.pop(rank), 0)
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                if write_deaths:
                    view.write_death(rank, os.waitstatus_to_exitcode(status))
                found[rank] = RankOutcome(rank, None, None, 0, number or -1, time.monotonic_ns())
    return [found[rank] for rank in ranks]


def _dump(pids: dict[int, int], view: ControlView, seconds: float) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)  # every rank writes its stack to stderr
    time.sleep(0.3)
    slots = "\n".join(f"  {slot}" for slot in [view.read_slot(rank) for rank in range(view.world_size)])
    raise RanksHungError(f"ranks hung for {seconds} s:\n{slots}")


def _reap(pids: dict[int, int]) -> None:
    limit = time.monotonic() + 2
    while pids:
        for rank, pid in list(pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[rank]
            elif time.monotonic() > limit or sys.exc_info()[0] is not None:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def rank_pool(session: Session) -> RankPool:
    """Return the rank pool of a started session: its handles, its supervisor, its events."""
    return session._ranks.running


def worker_states(pool: Pool) -> dict[Any, str]:
    """Return what each worker of a pool does, by its process, as far as the pool knows it."""
    return {
        each.process: "waits" if not each.message else "runs" if each.begun.value == each.given else "reads"
        for each in list(pool._pipes._workers.values())
        if each.is_ready
    }
