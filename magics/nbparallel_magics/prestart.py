"""Warm: a supervisor and its template, started when the extension is loaded, that wait for the first cell.

It is one process being started and nothing else: no thread, no import beyond what starting takes, no output.
What cannot be started now is not: the first cell tries again, and says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbparallel_magics.configuration import NbParallel

if TYPE_CHECKING:
    from nbparallel.session.processes.launch import SupervisorLaunch

RENEWALS = 3
"""How often it is started anew because a cell has changed what it depends on; arbitrary."""


class PrestartedSupervisor:
    """Owns what waits until it is taken or put out; used by the shell's thread alone."""

    def __init__(self, configuration: NbParallel) -> None:
        self._configuration = configuration
        self._waiting: SupervisorLaunch | None = None
        self._renewals = 0

    def start(self) -> None:
        """Start it, if the user wants that, and return at once."""
        if not self._configuration.warm:
            return
        from nbparallel.errors import StartError
        from nbparallel.session.interrupts import InterruptCounter
        from nbparallel.session.processes import launch

        with InterruptCounter():  # an interrupt waits until there is something that can be put out
            try:
                self._waiting = started = launch.SupervisorLaunch(self._configuration.start_method)
            except (StartError, OSError):
                return
            started.waited = True

    def take(self) -> SupervisorLaunch | None:
        """Give away what waits, to be owned by the caller; None if nothing does that can be used."""
        if not self._usable():
            self.terminate()
        taken, self._waiting = self._waiting, None
        return taken

    def tend(self) -> None:
        """Look after a cell whether what waits can still be used; if not, start it anew."""
        if self._waiting is None or self._usable():
            return
        self.terminate()
        self._renewals += 1
        if self._renewals <= RENEWALS:
            self.start()

    def _usable(self) -> bool:
        waiting, wanted = self._waiting, self._configuration
        return waiting is not None and wanted.warm and waiting.fits(wanted.start_method)

    def terminate(self) -> None:
        """End what waits, if anything does; an interrupt raises when that is done."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            from nbparallel.session.interrupts import InterruptCounter

            with InterruptCounter():
                waiting.terminate()
