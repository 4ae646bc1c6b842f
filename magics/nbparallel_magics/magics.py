"""The magics of ``%load_ext nbparallel``; ranks refuse each by its name (`nbparallel.engine.shell`)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from IPython.display import display

from nbparallel.errors import NO_RANKS, labelled_ranks, rank_list
from nbparallel.errors.text.escaping import encodable
from nbparallel_magics import background, flags, run_cell as cells
from nbparallel_magics.arguments import MagicParser, documented_by
from nbparallel_magics.error_display import brief_errors, full_tracebacks
from nbparallel_magics.output import cell_views
from nbparallel_magics.run_cell import CellRequest, debug_rank, lines_above
from nbparallel_magics.state import ExtensionState
from nbparallel_magics.views import sharing
from nbparallel_magics.views.panel import show_panel, show_timeline
from nbparallel_magics.views.status import (
    hosts_table,
    household_report,
    own_segments_table,
    processes_table,
    segments_table,
    status_table,
    who_table,
)

if TYPE_CHECKING:
    from nbparallel.distributed.races.report import RaceReport
    from nbparallel.session import CellResult, Session
    from nbparallel.session.diagnostics.measurement import Scaling
    from nbparallel_magics.background import BackgroundCell
    from nbparallel_widgets.measured_view import ProfileView

_BLANK_LINES = re.compile(r"(?:[ \t]*\n)*")
LEFT_CLUSTER = "; the next cell runs on this machine, unless %parallel_cluster names the cluster again"
_NO_FRAME = 1_000_000
"""Frames above ours whose variables IPython would use: none, only the notebook's count."""


def stopped_note(world_size: int) -> str:
    """Return the line about ranks that were ended."""
    ranks = rank_list(range(world_size))
    return f"{ranks} {'was' if world_size == 1 else 'were'} ended; the notebook's arrays stay as they are"


def _comes_first(magic: str) -> NoReturn:
    raise UsageError(f"{magic} must be the first line of its cell: put comments and other code below it")


@magics_class
class ParallelMagics(Magics):
    """The magics; one instance a shell."""

    def __init__(self, state: ExtensionState) -> None:
        super().__init__(state.shell)
        self.state = state

    @line_cell_magic
    @no_var_expand
    @documented_by(flags.CELL)
    def parallel(self, line: str, cell: str | None = None) -> BackgroundCell | None:
        if cell is None:
            return self._run_line(flags.LINE, line)
        return self._run_cell(flags.CELL.parse_line(self._expanded(line)), "%%parallel", cell)

    @line_cell_magic
    @no_var_expand
    @documented_by(flags.RANK_CELL)
    def rank(self, line: str, cell: str | None = None) -> BackgroundCell | None:
        if cell is None:
            return self._run_line(flags.RANK_LINE, line, leading_ranks=True)
        return self._run_cell(
            flags.RANK_CELL.parse_line(self._expanded(line), leading_ranks=True), "%%rank", cell
        )

    # what IPython runs when a cell magic is not on the first line of its cell
    @line_magic("%parallel")  # type: ignore[arg-type]  # its annotation does not know of names
    @documented_by(flags.CELL)
    def parallel_below(self, _line: str) -> None:
        _comes_first("%%parallel")

    @line_magic("%rank")  # type: ignore[arg-type]
    @documented_by(flags.RANK_CELL)
    def rank_below(self, _line: str) -> None:
        _comes_first("%%rank")

    def _run_cell(self, options: argparse.Namespace, magic: str, cell: str) -> BackgroundCell | None:
        offset = lines_above(self.state.raw_cell, magic, cell)
        above = _BLANK_LINES.match(cell)  # IPython drops them, and with them the count of lines
        blank = above[0] if above else ""
        return cells.run(self.state, CellRequest(cell[len(blank) :], offset + blank.count("\n"), options))

    def _run_line(
        self, parser: MagicParser, line: str, *, leading_ranks: bool = False
    ) -> BackgroundCell | None:
        options, source = parser.parse_head(line, leading_ranks=leading_ranks, expand=self._expanded)
        if not source:
            parser.error(
                f"there is nothing to run on this line; %{parser.prog}, with two %, runs those below"
            )
        offset = lines_above(self.state.raw_cell, parser.prog, source) - 1
        return cells.run(self.state, CellRequest(source, max(0, offset), options))

    def _expanded(self, line: str) -> str:
        """Put the notebook's values into ``{x}`` and ``$x`` of the flags, not of the code."""
        return str(self.state.shell.var_expand(line, depth=_NO_FRAME))

    @line_magic
    @documented_by(flags.SHARE)
    def share(self, line: str) -> None:
        missing = "which arrays? name them, as in %share weights gradients"
        self._send(flags.SHARE, line, missing, partial(sharing.share, self.state))

    @line_magic
    @documented_by(flags.PUSH)
    def parallel_push(self, line: str) -> None:
        session, variables = self._session_to(flags.PUSH), self.state.shell.user_ns
        missing = "which names? as in %parallel_push x y"
        self._send(flags.PUSH, line, missing, lambda names: session.push_names(names, variables))

    @line_magic
    @documented_by(flags.CLUSTER)
    def parallel_cluster(self, line: str) -> None:
        (options, name), variables = flags.CLUSTER.parse_head(line), self.state.shell.user_ns
        if name:
            if name not in variables:
                flags.CLUSTER.error(f"the notebook has no variable {name!r}")
            with brief_errors():
                self.state.use_elsewhere(cluster=variables[name], **vars(options))
        session = self.state.session
        if session is None or not session.hosts:
            flags.CLUSTER.error("no cluster is used: %parallel_cluster client")
        activity = session.activity() if session.started else None
        display(hosts_table(session.hosts, () if activity is None else activity.ranks))

    @line_magic
    @documented_by(flags.STRATEGY)
    def sharing_strategy(self, line: str) -> None:
        options, words = flags.parse_strategy(line)
        if options.bench:
            sharing.bench(self.state.running_session(), options.seconds)
            return
        if words:
            print(sharing.switch(words))  # noqa: T201
        else:
            display(sharing.strategies_table())

    @line_magic
    @documented_by(flags.STATUS)
    def parallel_status(self, line: str) -> None:
        options = flags.STATUS.parse_line(line)
        session = self.state.running_session()
        if session is None:
            print(NO_RANKS)  # noqa: T201
        else:
            table = status_table(session.statistics())
            self._display(session, table.unfolded() if options.all else table)
        if (report := household_report()) is not None and report.processes:
            display(processes_table(report))

    @line_magic
    @documented_by(flags.SEGMENTS)
    def parallel_segments(self, line: str) -> None:
        options = flags.SEGMENTS.parse_line(line)
        session = self.state.running_session()
        if session is None:
            from nbparallel.sharing import segments  # brings numpy, which loading must not

            display(segments())
        else:
            names = self.state.shell.user_ns
            who = session.who(names, self.state.shell.user_ns_hidden)
            table = segments_table(session.statistics(names), who, internals=options.all)
            display(table.unfolded() if options.all else table)
        if (report := household_report()) is not None and report.segments:
            display(own_segments_table(report))

    @line_magic
    @documented_by(flags.WHO)
    def parallel_who(self, line: str) -> None:
        options = flags.WHO.parse_line(line)
        session = self.state.running_session()
        if session is None:
            print(NO_RANKS)  # noqa: T201
        else:
            shell = self.state.shell
            seen = session.who(shell.user_ns, shell.user_ns_hidden)
            self._display(session, who_table(seen, every=options.all))

    @line_magic
    @documented_by(flags.DOCTOR)
    def parallel_doctor(self, line: str) -> None:
        options = flags.DOCTOR.parse_line(line)
        from nbparallel.session import examine  # brings numpy, which loading must not

        chosen, session = self.state.configuration, self.state.running_session()
        found = examine(chosen.start_method, read_in_place=chosen.read_in_place, session=session)
        display(found.table().unfolded() if options.all else found)

    @line_magic
    @needs_local_scope
    @no_var_expand
    @documented_by(flags.DEBUG)
    def debug(self, line: str, local_ns: Any = None) -> None:
        if not re.match(r"\s*(-r|--ranks)", line):
            # IPython's own, which calls our `ErrorRendering` if there is no code
            self.state.shell.magics_manager.registry["ExecutionMagics"].debug(line, None, local_ns)
            return
        ranks = flags.DEBUG.parse_line(line).ranks
        failures = getattr(getattr(sys, "last_value", None), "failures", None) or self.state.failures
        if not failures:
            flags.DEBUG.error("no cell has failed on ranks yet")
        debug_rank(self.state, failures, ranks)

    @line_magic
    @documented_by(flags.RACES)
    def parallel_races(self, line: str) -> RaceReport:
        flags.RACES.parse_line(line)
        report: RaceReport | None = self.state.races.last
        if report is None:
            flags.RACES.error("the last cell on ranks was not checked for data races: give it --check-races")
        return report

    @line_magic
    @documented_by(flags.PROFILE)
    def parallel_profile(self, line: str) -> ProfileView:
        flags.PROFILE.parse_line(line)
        from nbparallel.distributed.tracing import profiling  # brings numpy, which loading must not

        if profiling.last is None:
            flags.PROFILE.error("no cell has been profiled yet: give one --profile, or nbp.map profile=True")
        return cell_views.profile_picture(profiling.last)

    @line_magic
    @documented_by(flags.TIMELINE)
    def parallel_timeline(self, line: str) -> None:
        options = flags.TIMELINE.parse_line(line)
        show_timeline(self.state, options.save, options.begin, options.end)

    @line_magic
    @documented_by(flags.SCALING)
    def parallel_scaling(self, line: str) -> Scaling:
        flags.SCALING.parse_line(line)
        if self.state.scaling is None:
            flags.SCALING.error("no cell was measured yet: %%parallel --scaling 1,2,4 does it")
        return self.state.scaling

    @line_magic
    @documented_by(flags.DRAW)
    def parallel_draw(self, line: str) -> None:
        options, names = flags.parse_draw(line)
        session = self._session_to(flags.DRAW)
        ranks = (
            None if options.ranks is None else options.ranks.resolve(session.world_size, session.place.parts)
        )
        with brief_errors():
            cell_views.show_now(session, names, ranks, self.state.shell.user_ns)

    @line_magic
    @documented_by(flags.PANEL)
    def parallel_panel(self, line: str) -> None:
        show_panel(self.state, close=flags.PANEL.parse_line(line).close)

    @line_magic
    @documented_by(flags.RESTART)
    def parallel_restart(self, line: str) -> None:
        options = flags.RESTART.parse_line(line)
        session = self._session_to(flags.RESTART)
        chosen = cells.chosen_ranks(options, session)
        with brief_errors():
            for rank in [None] if chosen is None else chosen:
                session.restart(rank)
        ranks = rank_list(range(session.world_size) if chosen is None else chosen)
        print(f"{ranks} restarted, without variables")  # noqa: T201

    @line_magic
    @documented_by(flags.STOP)
    def parallel_stop(self, line: str) -> None:
        flags.STOP.parse_line(line)
        session, cell = self.state.running_session(), self.state.background
        elsewhere = session is not None and session.place.parts
        running = "" if cell is None or cell.pending.done() else f"In[{cell.number}] had not ended; "
        self.state.stop()
        ended = NO_RANKS if session is None else running + stopped_note(session.world_size)
        print(f"{ended}{LEFT_CLUSTER * bool(elsewhere)}")  # noqa: T201

    @line_magic
    @documented_by(flags.RESULT)
    def parallel_result(self, line: str) -> CellResult:
        state = self.state
        variables = state.shell.user_ns
        _, name = flags.RESULT.parse_head(line)
        cell = background.find(name, variables) if name else state.background
        if cell is None:
            flags.RESULT.error("no cell was run with --async yet")
        return background.fetch(cell, state.new_output, variables, state.remember, state.views)

    @line_magic
    @documented_by(flags.OUTPUT)
    def parallel_output(self, line: str) -> None:
        flags.OUTPUT.parse_line(line)
        if self.state.last_output is None:
            flags.OUTPUT.error("no cell has run on ranks yet")
        self.state.last_output.repeat(self.state.new_output(keep=False))

    @line_magic
    @documented_by(flags.TRACEBACK)
    def parallel_tb(self, line: str) -> None:
        options = flags.TRACEBACK.parse_line(line)
        if not self.state.failures:
            flags.TRACEBACK.error("no cell has failed on ranks yet")
        session = self.state.running_session()
        size, place = 0 if session is None else session.world_size, self.state.failures_place
        with labelled_ranks(place.label_of):
            text = full_tracebacks(self.state.failures, options.ranks, size, place.parts)
        print(text)  # noqa: T201

    def _send(
        self, parser: MagicParser, line: str, missing: str, send: Callable[[list[str]], Sequence[str]]
    ) -> None:
        """Send the names of a line, and print what is to be said of it."""
        names = line.replace(",", " ").split()
        if not names:
            parser.error(missing)
        with brief_errors():
            notes = send(names)
        for note in notes:
            print(encodable(note))  # noqa: T201

    def _display(self, session: Session, view: object) -> None:
        """Show a view of a session."""
        with labelled_ranks(session.place.label_of):
            display(view)

    def _session_to(self, parser: MagicParser) -> Session:
        session = self.state.running_session()
        if session is None:
            parser.error(NO_RANKS)
        return session
