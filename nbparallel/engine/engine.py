"""Engine: what a rank keeps from task to task."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from typing import Any

import nbparallel
from nbparallel import distributed, sharing
from nbparallel.channel import Channel
from nbparallel.channel.segment_client import SegmentClient
from nbparallel.distributed.communicator import Communicator
from nbparallel.engine import environment, namespace, tasks
from nbparallel.engine.debugger import Breakpoints
from nbparallel.engine.input import InputRequests
from nbparallel.engine.inspection import complete, look
from nbparallel.engine.interrupts import Interrupts
from nbparallel.engine.output import RankOutput, mark_threads, packed
from nbparallel.engine.shell import RankShell
from nbparallel.errors import ProtocolError
from nbparallel.transfer import definitions
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.messages import Configure, JoinWorld, Outcome, Task

OPERATIONS = (
    "send", "recv", "isend", "irecv", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier",
)  # fmt: skip
"""Operations that are predefined on a rank."""
MANY_MODULES = 100
"""A cell that has imported so many leaves enough objects that a full collection is due soon; arbitrary."""


class Engine:
    """The rank's state: shell, communicator, output.

    Attributes
    ----------
    configure : Configure
    shell : RankShell
    output : RankOutput
    interrupts : Interrupts
    communicator : Communicator or None
        That of the current epoch.
    """

    def __init__(
        self, channel: Channel, broker: SegmentClient, configure: Configure, shell: RankShell
    ) -> None:
        self._channel = channel
        self.broker = broker
        self.configure = configure
        self.shell = shell
        self.pid = os.getpid()
        self.output = RankOutput(channel)
        mark_threads(self.output)
        self.asking = InputRequests(channel, self.output)
        self.asking.install()
        self.breakpoints = Breakpoints(self.asking.input)
        self.breakpoints.install()
        os.register_at_fork(before=self.output.flush)  # else a child would write the same text again
        environment.set_environment(configure)
        environment.limit_blas(configure.blas_threads)
        shell.attach(self.output, configure.colors)
        self.interrupts = Interrupts(configure.rank)
        self.interrupts.install()
        self.communicator: Communicator | None = None
        self.place = self.next_place = configure.place
        """Where the notebook was before this task, and where it is."""
        self.choice = b""
        """The notebook's decision about sharing strategies, pickled, until the next task follows it."""
        self.applied = -1
        """The last task whose names were taken."""
        self.defaults = environment.Defaults(shell.user_ns, shell.user_ns_hidden)
        self.defaults.set(
            rank=configure.rank,
            world_size=configure.world_size,
            rng=environment.random_streams(configure.seed, configure.rank),
            nbp=nbparallel,
            dist=distributed,
            **{name: getattr(distributed, name) for name in OPERATIONS},
        )
        definitions.set_home(shell.user_ns, shell.user_ns_hidden)
        self._view: ControlView | None = None
        self._kept: Any = None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.configure.rank

    def handle(self, frame: Frame) -> None:
        """Do what a frame of the kernel says."""
        if frame.kind is Kind.STRATEGY:
            self.choice = pickle.loads(frame.payload)
            return
        if frame.kind is Kind.PLACE:
            self.next_place = pickle.loads(frame.payload)
            return
        if frame.kind is Kind.LOOK:  # may come from another thread, while the last value is being taken
            self._channel.send(Kind.SEEN, packed(look(self, pickle.loads(frame.payload))))
            return
        if frame.kind is Kind.COMPLETE:
            self._channel.send(Kind.SEEN, packed(complete(self.shell, pickle.loads(frame.payload))))
            return
        if frame.kind is Kind.INPUT:
            return  # the answer to a question that an interrupt has ended
        self._kept = None  # the kernel has taken the last value, or it would not speak
        if frame.kind is Kind.COMMUNICATOR:
            self._join(pickle.loads(frame.payload), frame)
        elif frame.kind is Kind.CELL:
            task = pickle.loads(frame.payload)
            assert isinstance(task, Task)
            self._run(task)
        else:
            raise ProtocolError(f"a rank cannot handle {frame.kind!r}")

    def tidy(self) -> None:
        """Take back memory that others have let go of."""
        self._let_go()
        sharing.current_store().drain()

    def _let_go(self) -> None:
        if self.communicator is not None:
            self.communicator.release()
        namespace.let_go(self.shell.user_ns)

    def tend(self) -> float | None:
        """Give back memory that nobody has needed for long; return when to come again, in milliseconds."""
        seconds = sharing.current_store().tend()
        return None if seconds is None else 1000 * seconds + 1

    def _join(self, join: JoinWorld, frame: Frame) -> None:
        if self.communicator is not None:
            self.communicator.close()
        if self._view is not None:
            self._view.close()
        view = self._view = ControlView(frame.fds[0])
        self.interrupts.use(view)
        self.communicator = Communicator(
            view,
            self.rank,
            join.world_size,
            sharing.current_store(),
            epoch=join.epoch,
            usable_cpus=self.configure.usable_cpus,
        )
        self.communicator.record()
        distributed.set_current(self.communicator)
        environment.resize_environment(join.world_size)
        self.defaults.set(world_size=join.world_size)

    def _run(self, task: Task) -> None:
        self.output.task = task.number
        modules = len(sys.modules)
        outcome, kept = tasks.run(self, task)
        if os.getpid() != self.pid:
            # user code forked, and the child came back here: it is no rank (FAULTS F64)
            self.output.flush()
            os._exit(0 if outcome.ok else 1)
        self._kept = kept
        if len(sys.modules) >= modules + MANY_MODULES and gc.isenabled():
            gc.collect()  # now: it would hold up this rank, and who waits for it, somewhere in a later cell
        self._report(outcome)
        if not outcome.ok:
            gc.collect()  # what formatted the traceback refers to itself, and to frames with their arrays
        self._let_go()  # `tend` comes after every frame, and drains

    def _report(self, outcome: Outcome) -> None:
        self.output.settle()
        self._channel.send(Kind.RESULT, packed(outcome), sequence=outcome.number)
