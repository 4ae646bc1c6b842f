"""Membership of a world that is being formed: which ranks have joined, and whether they are compatible.

A pure state machine, as the ledger: no socket, no clock.
"""

from __future__ import annotations

from nbparallel.errors import rank_list
from nbparallel.wire.control_layout import MAX_WORLD_SIZE
from nbparallel.wire.identity import Process
from nbparallel.wire.rendezvous import Join


class Membership:
    """The processes that have joined, by rank.

    Attributes
    ----------
    world_size : int
        How many there will be, by the first JOIN; 0 before it.
    """

    def __init__(self) -> None:
        self.world_size = 0
        self._entries: dict[int, tuple[Join, Process]] = {}

    def enter(self, join: Join, process: Process) -> str:
        """Record a process; return why no world can be formed, empty if one can.

        If two processes contradict each other, it cannot be known which is right: all of them are refused
        immediately, instead of when their time-outs end.
        """
        rank, size = join.rank, join.world_size
        if not 1 <= size <= MAX_WORLD_SIZE or rank >= size:
            return f"process {process.pid} joined as rank {rank} of {size}, which is not possible"
        for other, (their, earlier) in self._entries.items():
            if their.world_size != size:
                return (
                    f"the world sizes differ: rank {other} (process {earlier.pid}) has {their.world_size}, "
                    f"rank {rank} (process {process.pid}) has {size}; give all the same WORLD_SIZE"
                )
            if other == rank:
                return (
                    f"rank {rank} joined twice, as process {earlier.pid} and as process {process.pid}: every "
                    "process needs a RANK of its own, and every world its own MASTER_PORT or file"
                )
            if their.versions != join.versions:
                return (
                    f"not all run the same: rank {other} (process {earlier.pid}) {their.versions}, "
                    f"rank {rank} (process {process.pid}) {join.versions}"
                )
        self.world_size = size
        self._entries[rank] = join, process
        return ""

    @property
    def complete(self) -> bool:
        """Whether all have joined."""
        return 0 < self.world_size == len(self._entries)

    @property
    def missing(self) -> str:
        """The ranks that have not joined, in words."""
        return rank_list(rank for rank in range(self.world_size) if rank not in self._entries)

    @property
    def members(self) -> tuple[Process, ...]:
        """The processes that have joined, in rank order."""
        return tuple(process for _, (_, process) in sorted(self._entries.items()))

    @property
    def cpus(self) -> int:
        """How many CPUs they may use together: a launcher may have bound each to its own."""
        return len({cpu for join, _ in self._entries.values() for cpu in join.cpus})
