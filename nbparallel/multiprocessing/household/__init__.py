"""The household: processes that a notebook, a script or a rank starts itself, as clients of one supervisor.

::

    root K ──segments── supervisor           `root_supervisor`: K's own, beside those of its sessions
      │ └─ fork, spawn, forkserver                 (a rank, or a member of a world, uses the one that it has)
      └── guest ──segments──┘                 `channel.introduce`: K introduces it, it announces itself
            └── guest ──segments──┘               and so on, to any depth

What they send to each other goes through pipes that no supervisor sees; a `SupervisorConnection` says how a
message keeps alive what it refers to (`post`, `take`).  They end with K: the supervisor sees to that, and
the kernel if the supervisor was killed (`lifeline`).
"""

from nbparallel.multiprocessing.household.root_supervisor import (
    Fork,
    HouseholdReport,
    InheritedConnection,
    SupervisorConnection,
    begin_as_guest,
    current_membership,
    introduce_guest,
    membership,
    prepare_fork,
    report,
    stop,
    supervised,
)

__all__ = [
    "Fork",
    "HouseholdReport",
    "InheritedConnection",
    "SupervisorConnection",
    "begin_as_guest",
    "current_membership",
    "introduce_guest",
    "membership",
    "prepare_fork",
    "report",
    "stop",
    "supervised",
]
