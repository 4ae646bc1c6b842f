"""The state of a rank that outlives a task: its shell, its communicator, its predefined names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from nbparallel.channel.channel import SegmentClient
from nbparallel.distributed.communicator import Communicator
from nbparallel.engine.debugger import Breakpoints, FailureFrames
from nbparallel.engine.environment import Defaults, FollowedSettings
from nbparallel.engine.interrupts import Interrupts
from nbparallel.engine.namespace import RankNames
from nbparallel.engine.output import RankOutput
from nbparallel.engine.shell import RankShell
from nbparallel.wire.control import ControlView
from nbparallel.wire.messages import Configure, WorkingContext


@dataclass(slots=True, eq=False)
class RankState:
    """What a rank keeps from task to task; `Engine` owns it, running and describing a task reads it."""

    rank: int
    """Number of this rank."""
    configure: Configure
    """It and the rank's settings, from the kernel."""
    shell: RankShell
    """The IPython shell that runs cells."""
    variables: dict[str, Any]
    """The user's namespace: globals of cells."""
    output: RankOutput
    """Streams and displays of the rank."""
    broker: SegmentClient
    """Connection through which segments of other processes are fetched."""
    interrupts: Interrupts
    """Handler of SIGINT, armed while a task runs."""
    breakpoints: Breakpoints
    """``breakpoint()`` on this rank."""
    frames: FailureFrames
    """Those of its last failure."""
    defaults: Defaults
    """Predefined names."""
    names: RankNames
    """Which variables the notebook delivered."""
    context: WorkingContext
    """Directory and path of the notebook that this rank follows."""
    next_context: WorkingContext
    """Those of the next task."""
    settings: FollowedSettings
    """Those of the notebook's libraries."""
    communicator: Communicator | None = None
    """That of the current epoch."""
    control: ControlView | None = None
    """The control segment of the current epoch."""
    strategy_choice: bytes = b""
    """The notebook's choice of sharing strategies, pickled, until the next task follows it."""
    applied: int = -1
    """Number of the last task whose names were applied."""
    pid: int = field(default_factory=os.getpid)
    """The rank's own process; a child that user code forked has another."""

    def is_forked_child(self) -> bool:
        """Whether this process is a child of the rank, forked by user code."""
        return os.getpid() != self.pid
