"""A supervisor and its template, started when the extension is loaded, that wait for the first cell.

Loading starts one process: no thread, no import beyond what starting takes, no output.  If it cannot be
started, the first cell tries again and raises the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbparallel_magics.configuration import NbParallel

if TYPE_CHECKING:
    from nbparallel.session.processes.launch import SupervisorLaunch

RENEWALS = 3
"""Restarts because a cell has changed what the supervisor depends on; arbitrary."""


class PrestartedSupervisor:
    """Owns the waiting supervisor until it is taken or terminated; used by the shell's thread alone."""

    def __init__(self, configuration: NbParallel) -> None:
        self._configuration = configuration
        self._waiting: SupervisorLaunch | None = None
        self._renewals = 0

    def start(self) -> None:
        """Start one, if the user wants that, without waiting for it."""
        if not self._configuration.warm:
            return
        from nbparallel.errors import StartError
        from nbparallel.session.interrupts import InterruptCounter
        from nbparallel.session.processes import launch

        with InterruptCounter():  # an interrupt waits until there is something to terminate
            try:
                self._waiting = started = launch.SupervisorLaunch(self._configuration.start_method)
            except (StartError, OSError):
                return
            started.waited = True

    def take(self) -> SupervisorLaunch | None:
        """Return the waiting supervisor, which the caller then owns; None if there is no usable one."""
        if not self._usable():
            self.terminate()
        taken, self._waiting = self._waiting, None
        return taken

    def renew_if_stale(self) -> None:
        """Start another after a cell that made the waiting one unusable (decision 17).

        Nothing is checked once the first session has taken it.
        """
        if self._waiting is None or self._usable():
            return
        self.terminate()
        self._renewals += 1
        if self._renewals <= RENEWALS:
            self.start()

    def _usable(self) -> bool:
        waiting, wanted = self._waiting, self._configuration
        return waiting is not None and wanted.warm and waiting.is_current(wanted.start_method)

    def terminate(self) -> None:
        """End the waiting supervisor, if there is one; an interrupt raises when that is done."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            from nbparallel.session.interrupts import InterruptCounter

            with InterruptCounter():
                waiting.terminate()
