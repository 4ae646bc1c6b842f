"""Liveness of the owners of names: dead only if that is certain.

Some facts (kill(2), proc(5)):

* signal 0 is not delivered, but checks that the process exists: ESRCH is certain, EPERM means that the pid
  belongs to another user's process;
* a process that has ended stays a zombie until its parent waits for it; in a container without an init
  possibly forever.  A process whose other threads go on looks like a zombie, too.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

from nbparallel.wire.identity import Process, World, process_state, shows_our_pids
from nbparallel.wire.owners import Owner


class Liveness(enum.Enum):
    """What is known of an owner."""

    DEAD = "dead"
    """All its processes have ended, for sure."""
    LIVING = "living"
    """One of them runs."""
    UNKNOWN = "unknown"
    """Neither is certain."""


@dataclass(frozen=True, slots=True)
class LivenessResult:
    """An owner's liveness, and how it is known."""

    liveness: Liveness
    """Dead, living, or not known."""
    reason: str
    """In words."""


class OwnerLiveness:
    """Checks owners, as seen from this process's world; checks every process once."""

    def __init__(self, here: World, boot_time: float | None) -> None:
        self._here = here
        self._boot_time = boot_time
        self._numbers_mean_ours = shows_our_pids()
        self._known: dict[Process, LivenessResult] = {}

    def check(self, owner: Owner, written: float, *, on_disk: bool) -> LivenessResult:
        """Return what is known of an owner.

        Parameters
        ----------
        written : float
            When its record was made, in seconds as file times are.
        on_disk : bool
            Whether the record lies on a disk of this machine, where it outlives a boot.
        """
        there, here = owner.world, self._here
        if not there.boot or not here.boot or not there.pid_namespace or not here.pid_namespace:
            return LivenessResult(
                Liveness.UNKNOWN, "the system did not say which boot or container it was made in"
            )
        if there.boot != here.boot:
            return self._before_boot(owner, written, on_disk=on_disk)
        if there.pid_namespace != here.pid_namespace:
            return LivenessResult(
                Liveness.UNKNOWN, "made in another container, whose processes are not seen here"
            )
        results = [self._process(process, owner.world) for process in owner.processes]
        for liveness in (Liveness.LIVING, Liveness.UNKNOWN):
            for result in results:
                if result.liveness is liveness:
                    return result
        return LivenessResult(Liveness.DEAD, "its processes have ended")

    def _before_boot(self, owner: Owner, written: float, *, on_disk: bool) -> LivenessResult:
        same = bool(owner.world.machine) and owner.world.machine == self._here.machine
        # Another boot id alone proves nothing: containers may have one of their own, and a directory may be
        # shared between machines that run at the same time.
        if on_disk and same and self._boot_time is not None and written < self._boot_time:
            return LivenessResult(Liveness.DEAD, "this machine has been booted since")
        return LivenessResult(
            Liveness.UNKNOWN, "made on another machine, or in a container with a boot id of its own"
        )

    def _process(self, process: Process, world: World) -> LivenessResult:
        known = self._known.get(process)
        if known is None:
            known = self._known[process] = self._inspect(process, world)
        return known

    def _inspect(self, process: Process, world: World) -> LivenessResult:
        pid = process.pid
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return LivenessResult(Liveness.DEAD, f"process {pid} has ended")
        except OSError:
            pass  # another user's: start times show whether it is the same process
        state = process_state(pid) if self._numbers_mean_ours else None
        if state is None or not process.started:
            return LivenessResult(
                Liveness.UNKNOWN, f"there is a process {pid}, but not whether it is the same"
            )
        if world.time_namespace != self._here.time_namespace:
            return LivenessResult(Liveness.UNKNOWN, f"there is a process {pid}, in another time namespace")
        if state.started != process.started:
            return LivenessResult(Liveness.DEAD, f"process {pid} has ended, another one has its number")
        if state.letter in "ZX" and not _has_threads(pid):
            return LivenessResult(
                Liveness.DEAD, f"process {pid} has ended, its parent has not asked for it yet"
            )
        return LivenessResult(Liveness.LIVING, f"process {pid} lives")


def _has_threads(pid: int) -> bool:
    try:
        return len(os.listdir(f"/proc/{pid}/task")) != 1
    except OSError:
        return True
