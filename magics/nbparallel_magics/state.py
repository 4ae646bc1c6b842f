"""The extension's state in one shell: its session, and what the magics remember of the last cell."""

from __future__ import annotations

import atexit
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from traitlets import Bool, Enum, Float, Int, TraitError
from traitlets.config import Config, Configurable

from nbparallel.errors import StartError
from nbparallel.session import running_sessions
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import do_all
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.cell_views import CellView, chart, picture, profile_picture
from nbparallel_magics.output.overflow import LogFolder
from nbparallel_magics.output.publisher import NotebookOutput, is_ipykernel, publisher_for

if TYPE_CHECKING:
    from nbparallel.session import Session
    from nbparallel.session.diagnostics.measurement import Scaling
    from nbparallel.session.processes.launch import SupervisorLaunch
    from nbparallel.wire.messages import RankFailure
    from nbparallel_magics.background import BackgroundCell
    from nbparallel_widgets.panel import Panel


_SCALING = "nbparallel.session.diagnostics.measurement", "Scaling"


class NbParallel(Configurable):
    """Defaults of ``%%parallel``; a flag in a cell wins over them."""

    n = Int(0, min=0, help="Ranks of a new session; 0: one per CPU that the notebook may use.").tag(
        config=True
    )
    ranks_per_cpu = Int(
        8, min=1, help="More ranks than this for each CPU that the notebook may use are refused."
    ).tag(config=True)
    output = Enum(
        ("rank", "stream"),
        "rank",
        help="rank: output is in rank order when the cell has ended; stream: it stays as it came, which a "
        "log that cannot be cleared needs (papermill.execute_notebook with log_output).",
    ).tag(config=True)
    timeout = Float(0.0, min=0.0, help="Seconds after which a cell is interrupted; 0: never.").tag(
        config=True
    )
    queue = Bool(False, help="Let cells wait for --async cells that run, instead of refusing them.").tag(
        config=True
    )
    quiet = Bool(False, help="Show no output and no values of ranks, only errors.").tag(config=True)
    keep_messages = Bool(
        False, help="Keep messages that no rank received for later cells; else they are dropped, with a note."
    ).tag(config=True)
    welcome = Bool(
        True, help="Show under the first cell which names ranks have, and how many ranks there are."
    ).tag(config=True)
    read_in_place = Bool(
        True,
        help="Let ranks read each other's large private arrays where they lie, in one copy; else such arrays "
        "are copied into shared memory first.",
    ).tag(config=True)
    keep_frames = Bool(
        True, help="Have each rank keep the frames of its last failure until its next cell, for %debug."
    ).tag(config=True)
    start_method = Enum(
        ("forkserver", "spawn"),
        "forkserver",
        help="How ranks start: forkserver: forked from a prepared process; spawn: as fresh interpreters.",
    ).tag(config=True)
    warm = Bool(
        True, help="Start the process that ranks are forked from when loaded, not with the first cell."
    ).tag(config=True)


def configured(shell: Any) -> NbParallel:
    """Return the defaults as the shell's configuration has them.

    ``%config NbParallel.output = 'tabs'`` is refused, but IPython keeps the value: what cannot be is
    taken out of the configuration, with a line on stderr, so that the extension can be loaded.
    """
    section = shell.config.get("NbParallel", {})
    for name, value in list(section.items()):
        try:
            NbParallel(config=Config(NbParallel={name: value}))
        except TraitError as error:
            del section[name]
            sys.stderr.write(f"nbparallel: {error} The default is used.\n")
    return NbParallel(parent=shell)


# A supervisor and its template, started when the extension is loaded, that wait for the first cell.
#
# Loading starts one process: no thread, no import beyond what starting takes, no output.  If it cannot be
# started, the first cell tries again and raises the reason.

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
        from nbparallel.session.processes.launch import SupervisorLaunch

        with InterruptCounter():  # an interrupt waits until there is something to terminate
            try:
                self._waiting = started = SupervisorLaunch(self._configuration.start_method)
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
            with InterruptCounter():
                waiting.terminate()


def _make_session(
    world_size: int | None, start_method: str, prestarted: PrestartedSupervisor, elsewhere: Mapping[str, Any]
) -> Session:
    """Return a session; its supervisor starts before the session's code is imported."""
    from nbparallel.session.processes.launch import SupervisorLaunch

    launch = None if elsewhere else prestarted.take() or SupervisorLaunch(start_method)
    try:
        from nbparallel.session import Session

        return Session(world_size, start_method=start_method, launch=launch, **elsewhere)
    except BaseException:
        if launch is not None:
            launch.terminate()
        raise


def _rank_count(world_size: int) -> str:
    return f"{world_size} rank{'s' * (world_size != 1)}"


class ExtensionState:
    """The state of the extension in one shell; `load` makes it, `unload` ends it."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.configuration = configured(shell)
        self.session: Session | None = None
        self.prestarted = PrestartedSupervisor(self.configuration)
        """Supervisor and template for the first session."""
        self.failures: Mapping[int, RankFailure] = {}
        """Failures of the last cell that failed, the root cause first; or where ranks were interrupted."""
        self.failures_place = WorldPlace(0)
        """Where the ranks were then."""
        self.scaling: Scaling | None = None
        """What ``--scaling`` has measured last."""
        self.races = CellView("check_races", "race_report")
        profile = CellView("profile", "profile", profile_picture)
        self.views = (CellView("draw", "drawn", picture), self.races, profile)
        self.background: BackgroundCell | None = None
        """The last ``--async`` cell."""
        self.panel: Panel | None = None
        """The live panel, if one is open."""
        self.pool: Any = None
        """What it has seen of a pool of processes."""
        self.welcomed = False
        """Whether the line about what ranks find predefined was shown."""
        self.notes: list[str] = []
        """Lines for the next cell that shows output."""
        self.logs = LogFolder()
        """Folder of the output that exceeds a cell's limit."""
        self.notebook = NotebookOutput(shell.kernel) if is_ipykernel(shell) else None
        self.last_output: CellOutput | None = None
        """That of the last cell."""
        self.raw_cell = ""
        """The cell that runs, as the user sees it: the gutter counts its lines."""

    def interrupt(self, *_: object) -> None:
        """Interrupt the cell that the ranks run; takes no lock: it is a signal handler.

        The stop button between two cells calls it, so that it stops what ranks run in the background or for a
        subshell.  ipykernel ignores SIGINT while it handles no message: it puts back what it found before the
        first one (`Kernel.pre_handler_hook` and `post_handler_hook`).
        """
        if (session := self.session) is not None:
            session.interrupt()

    def running_session(self) -> Session | None:
        """Return the session if its ranks run."""
        session = self.session
        return session if session is not None and session.started else None

    def session_for(self, world_size: int | None) -> Session:
        """Return the session with `world_size` ranks (None: as many as there are), not necessarily started.

        Raises
        ------
        ValueError
            They are too many for the CPUs or the machine, or ranks that would go hold variables.
        """
        session = self.session
        if session is None:
            world_size = world_size or self.configuration.n or None
            self.check_size(world_size, 0)
            return self._new_session(world_size)
        if world_size is not None and world_size != session.world_size:
            if not session.place.parts:
                self.check_size(world_size, session.world_size)
            session.resize(world_size)
            if session.started:
                self.notes.append(f"{_rank_count(world_size)} from now on")
        return session

    def check_size(self, world_size: int | None, running: int) -> None:
        """Refuse so many ranks, of which some run; ValueError says why."""
        if world_size is not None and world_size > running:
            from nbparallel.session.processes.launch import check_ranks_per_cpu, check_world_size

            check_world_size(world_size, running)
            check_ranks_per_cpu(world_size, self.configuration.ranks_per_cpu)

    def note_default_size(self, session: Session) -> None:
        """Have the next cell show why there are so many ranks, where nothing but the CPUs says how many."""
        from nbparallel.session.processes.launch import cpu_count_text, usable_cpus

        cpus, size = usable_cpus(), session.world_size
        by_default = not self.configuration.n and size == cpus and not session.place.parts
        if self.configuration.welcome and by_default:
            note = f"{cpu_count_text(cpus)}, so {_rank_count(size)}; -n sets another number"
            if note not in self.notes:  # a cell that did not start them has left it there
                self.notes.append(note)

    def _notebook_session(self) -> tuple[Session, CellOutput]:
        session = self.session_for(None)
        session.keep_frames = self.configuration.keep_frames
        # a reprint in rank order would take a progress bar away
        return session, self.new_output("stream")

    def remember(self, error: BaseException) -> None:
        """Keep for ``%parallel_tb`` an error's failures of ranks: why they failed, or where they were."""
        failures: Mapping[int, RankFailure] = getattr(error, "failures", {})
        if failures:
            self.failures = failures
            if self.session is not None:
                self.failures_place = self.session.place

    def new_output(self, order: str = "", *, keep: bool = True) -> CellOutput:
        """Return what shows a cell's output here; `order`: ``rank`` or ``stream``, else as configured.

        With `keep` it is from now on what ``%parallel_output`` shows again.
        """
        publisher = publisher_for(self.shell, self.notebook)
        output = CellOutput(publisher, order=order or self.configuration.output, logs=self.logs)
        if keep:
            if self.last_output is not None:
                self.last_output.drop_record()
            self.last_output = output
        return output

    def use_elsewhere(self, **elsewhere: Any) -> None:
        """Have a session elsewhere, as these arguments of `nbparallel.Session` say, from the next cell on.

        Raises
        ------
        UsageError
            Ranks are running, and would end.
        """
        if self.running_session() is not None:
            raise UsageError("ranks are running: end them with %parallel_stop first")
        self.stop()
        self._new_session(None, elsewhere)

    def _new_session(self, world_size: int | None, elsewhere: Mapping[str, Any] | None = None) -> Session:
        try:
            with InterruptCounter():  # an interrupt waits until there is something that can be stopped
                session = self.session = _make_session(
                    world_size, self.configuration.start_method, self.prestarted, elsewhere or {}
                )
        except KeyboardInterrupt:
            self.stop()
            raise
        return session

    def stop(self) -> None:
        """End the ranks, what waits for them, and the panel; an interrupt raises when none is left."""
        with InterruptCounter():
            session, self.session = self.session, None
            steps = [] if session is None else [session.stop]
            do_all(self.close_panel, self.prestarted.terminate, *steps)

    def _at_exit(self) -> None:
        """End the ranks; nothing is sent to the notebook any more, least of all by a forked child."""
        panel, self.panel = self.panel, None
        if panel is not None:
            panel.close(leave=False)
        self._end()

    def close_panel(self) -> None:
        """Close the panel, if one is open; it stays as the text that it showed last."""
        panel, self.panel = self.panel, None
        if panel is not None:
            panel.close()

    def begin_cell(self, info: Any) -> None:
        """Prepare for a cell (IPython's ``pre_run_cell``)."""
        if self.notebook is None or self.notebook.begin_cell(self.shell.get_parent()):
            self.raw_cell = getattr(info, "raw_cell", "") or ""
        if self.panel is not None:
            self.panel.begin(publisher_for(self.shell, self.notebook))

    def end_cell(self, _result: Any = None) -> None:
        """Take back memory that a cell has released, and follow its changes (``post_run_cell``)."""
        sharing = sys.modules.get("nbparallel.sharing")
        if sharing is not None:
            sharing.current_store().drain()
        self.prestarted.renew_if_stale()
        if self.panel is not None:
            self.panel.end()

    def install(self) -> None:
        """Put the hooks into the shell."""
        self.shell.configurables.append(self.configuration)
        self.shell.events.register("pre_run_cell", self.begin_cell)
        self.shell.events.register("post_run_cell", self.end_cell)
        if self.notebook is not None:
            self.notebook.install()
            self._swap_idle_handler(signal.SIG_IGN, self.interrupt)
        running_sessions.use_notebook(self._notebook_session)
        self.shell.display_formatter.formatters["text/html"].for_type_by_name(*_SCALING, chart)
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Undo `install` and end the ranks."""
        running_sessions.use_notebook(None)
        self.shell.display_formatter.formatters["text/html"].pop(".".join(_SCALING), None)
        atexit.unregister(self._at_exit)
        if self.notebook is not None:
            self._swap_idle_handler(self.interrupt, signal.SIG_IGN)
            self.notebook.remove()
        self.shell.events.unregister("post_run_cell", self.end_cell)
        self.shell.events.unregister("pre_run_cell", self.begin_cell)
        self.shell.configurables.remove(self.configuration)
        self._end()

    def _swap_idle_handler(self, former: object, new: object) -> None:
        """Have SIGINT between cells handled by `new`, unless a library has put a handler of its own there."""
        if getattr(self.shell.kernel, "saved_sigint_handler", None) == former:
            self.shell.kernel.saved_sigint_handler = new

    def _end(self) -> None:
        """End the ranks, then what only they write to."""
        try:
            self.stop()
        finally:
            self.logs.remove()
