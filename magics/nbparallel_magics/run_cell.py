"""Running one cell on ranks: check it, run it in the session, show its outcome; and ``%debug`` afterwards."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.display import display

from nbparallel.errors import RANKS_INTERRUPTED, CellTimeoutError, NbParallelError, ParallelError, rank_list
from nbparallel.wire.units import seconds_text
from nbparallel_magics import flags
from nbparallel_magics.arguments import RankSpec
from nbparallel_magics.background import (
    BackgroundCell,
    PendingValues,
    note_failure,
    wait_for_turn,
)
from nbparallel_magics.error_display import brief_errors, does_not_compile, hide_our_frames
from nbparallel_magics.output.cell_output import CellOutput
from nbparallel_magics.output.cell_views import CellView
from nbparallel_magics.output.publisher import publisher_for
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.session import Session
    from nbparallel.wire.messages import RankFailure


_WELCOME = "each rank has its number `rank`, send, all_reduce …: %%parallel?"
"""With the label before it no longer than 79 characters."""


@dataclass(frozen=True, slots=True)
class CellRequest:
    """A cell and its flags."""

    source: str
    """The cell without its magic line."""
    line_offset: int
    """Lines above the source in the cell as the gutter counts them."""
    options: argparse.Namespace
    """The flags."""


def run(state: ExtensionState, request: CellRequest) -> BackgroundCell | None:
    """Run a cell on ranks; nothing is sent or started unless it can run.

    Returns the cell itself if it is not waited for (``--async``).

    Raises
    ------
    UsageError
        A flag cannot be met; one line.
    SyntaxError
        The cell does not compile.
    ParallelError, KeyboardInterrupt, CellTimeoutError
        As `nbparallel.Session.run`.
    """
    options = request.options
    check_compiles(state.shell, request)
    if getattr(options, "scaling", None):
        _measure(state, request)
        return None
    if _queues(state, options) and not options.background:
        wait_for_turn(state.background)
    session = _session(state, options)
    ranks = chosen_ranks(options, session)
    if getattr(options, "local", False):
        _run_here(state.shell, request.source)
    return _run_on_ranks(state, session, ranks, request)


_WITH_SCALING = {"scaling", "share", "timeout", "seed", "quiet"}


def _measure(state: ExtensionState, request: CellRequest) -> None:
    """Run a cell on ranks of its own, some at a time, and show how much faster it became (``--scaling``)."""
    from nbparallel.session.diagnostics.measurement import measure

    options = request.options
    given = vars(options).items()
    if any(value != flags.CELL.get_default(name) for name, value in given if name not in _WITH_SCALING):
        flags.CELL.error(
            "--scaling has ranks of its own; only --share, --timeout, --seed and --quiet go with it"
        )
    try:
        state.check_size(max(options.scaling), 0)
    except ValueError as error:
        raise UsageError(str(error)) from None
    cell = {**_common(state, request), "want_values": False, "show_values": False}
    with brief_errors():
        state.scaling = measure(
            lambda session: session.run(request.source, **cell), options.scaling, progress=not options.quiet
        )
    display(state.scaling)


def _common(state: ExtensionState, request: CellRequest) -> dict[str, Any]:
    """Return the arguments of `Session.run` for a cell, on whatever ranks."""
    options = request.options
    return {
        "namespace": state.shell.user_ns,
        "share": getattr(options, "share", None) or (),
        "timeout": options.timeout or state.configuration.timeout or None,
        # of ``In[n]``; newer IPythons count up before a cell, older ones after it
        "execution_count": state.shell.displayhook.prompt_count,
        "line_offset": request.line_offset,
        "seed": getattr(options, "seed", None),
    }


def _queues(state: ExtensionState, options: argparse.Namespace) -> bool:
    return bool(options.queue or state.configuration.queue)


def chosen_ranks(options: argparse.Namespace, session: Session) -> tuple[int, ...] | None:
    """Return the ranks of a session that ``--ranks`` names; None: all."""
    return (
        None
        if options.ranks is None
        else tuple(options.ranks.resolve(session.world_size, session.place.parts))
    )


def _session(state: ExtensionState, options: argparse.Namespace) -> Session:
    wanted = getattr(options, "n", None)
    try:
        if wanted and options.ranks is not None:
            options.ranks.resolve(wanted)  # before any rank is started
        with brief_errors():
            session = state.session_for(wanted)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if wanted is None and not session.started:
        state.note_default_size(session)
    return session


def lines_above(raw_cell: str, magic: str, source: str) -> int:
    """Return how many lines of the cell stand above `source`, the magic's own line included.

    Blank lines above the magic count, as the gutter counts them; 1 if the cell cannot be found in `raw_cell`
    (it is run by a function).
    """
    lines = raw_cell.split("\n")
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith(magic):
            rest = line.rstrip() if magic[:2] != "%%" else "\n".join(lines[number:])
            if rest.rstrip().endswith(source.rstrip()) and (
                magic[:2] != "%%" or rest.rstrip() == source.rstrip()
            ):
                return number
    return 1


def _run_on_ranks(
    state: ExtensionState, session: Session, ranks: tuple[int, ...] | None, request: CellRequest
) -> BackgroundCell | None:
    options, shell = request.options, state.shell
    session.keep_messages = state.configuration.keep_messages
    session.read_in_place = state.configuration.read_in_place
    session.keep_frames = state.configuration.keep_frames
    sink = _output(state, options)
    wanted: dict[str, Any] = {
        **_common(state, request),
        "ranks": ranks,
        "sink": sink,
        "want_values": options.out is not None or options.background,  # the handle's result() has them
        "show_values": options.out is None,
        "on_error": getattr(options, "on_error", "stop"),
    }
    views = []
    for view in state.views:
        if asked := view.wanted(options):
            views.append(view)
            wanted |= asked
    if options.out is not None and sink is not None and (advice := _without_value(request)):
        sink.note(advice)
    if options.background:
        return _submit(state, session, request, wanted, views)
    try:
        with brief_errors():
            result = session.run(request.source, **wanted)
    except (ParallelError, CellTimeoutError, KeyboardInterrupt) as error:
        state.remember(error)
        for view in views:
            view.show_of_error(error, sink)
        raise
    except BaseException as error:
        if any(note.startswith(RANKS_INTERRUPTED) for note in getattr(error, "__notes__", ())):
            hide_our_frames(error, shell)
        raise
    finally:
        if sink is not None:
            sink.finish()  # before an error is shown; the session has done so unless it could not start
    for view in views:
        view.show(result)
    if options.out is not None:
        shell.user_ns[options.out] = result.values
    if _TIMED.match(state.raw_cell) and not options.quiet:
        # IPython's lines below are of this process, which only waits; they are no output of a rank's
        seconds = sum(rank.cpu_seconds for rank in result.ranks.values())
        used = f"{rank_list(result.ranks)} used {seconds_text(seconds)} of processor time"
        publisher_for(shell, state.notebook).note(f"[nbparallel] {used}\n")
    return None


_TIMED = re.compile(r"\s*%%?time\b")


def _without_value(request: CellRequest) -> str:
    """Return a line for a cell with ``-o`` that has no value; empty if it has one, as far as can be seen."""
    try:
        last = ast.parse(request.source).body[-1]
    except (SyntaxError, ValueError, IndexError):
        return ""  # with IPython's syntax, or only comments
    match last:
        case ast.Expr():
            return ""
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            way = f": end it with a line `{name}`"
        case _:
            way = ""
    name = request.options.out
    return f"the cell does not end with an expression, so each rank's value in {name} is None{way}"


def _submit(
    state: ExtensionState,
    session: Session,
    request: CellRequest,
    wanted: dict[str, Any],
    views: list[CellView],
) -> BackgroundCell:
    """Run a cell in the background; an interrupt that comes now ends it, since `%parallel_result` cannot."""
    pending = None
    try:
        with brief_errors():
            pending = session.submit(request.source, queue=_queues(state, request.options), **wanted)
        cell = BackgroundCell(pending, wanted["execution_count"], request.options.out)
        note_failure(cell, wanted["sink"])
        for view in views:
            pending.add_done_callback(view.when_ended(publisher_for(state.shell, state.notebook)))
        if request.options.out is not None:
            state.shell.user_ns[request.options.out] = PendingValues(cell)
        state.background = cell
    except BaseException:
        if pending is not None:
            pending.cancel()
        raise
    return cell


def _output(state: ExtensionState, options: argparse.Namespace) -> CellOutput | None:
    """Return what shows the cell's output, first the lines that are due; None if it is quiet."""
    if options.quiet or state.configuration.quiet:
        return None
    sink = state.new_output(getattr(options, "output", None) or "")
    if state.configuration.welcome and not state.welcomed:
        state.welcomed = True
        sink.note(_WELCOME)
    for note in state.notes:
        sink.note(note)
    state.notes.clear()
    return sink


def check_compiles(shell: Any, request: CellRequest) -> None:
    """Raise the SyntaxError of a cell that does not compile, with the notebook's line."""
    from nbparallel.session.tasks.cell import check_source

    number = shell.displayhook.prompt_count
    try:
        check_source(request.source, line_offset=request.line_offset, execution_count=number)
    except SyntaxError as error:
        # under this name IPython shows "Cell In[3], line 4", with the line as it stands in the notebook
        lines = "\n" * request.line_offset + request.source
        error.filename = shell.compile.cache(lines, number, raw_code=lines)
        raise does_not_compile(error) from None


def _run_here(shell: Any, source: str) -> None:
    """Run a cell in the notebook; its error is raised, and shown once, by the cell that called us."""
    shown: list[Any] = []
    show = shell.showtraceback
    shell.showtraceback = lambda *args, **options: shown.append(args)
    try:
        outcome = shell.run_cell(source, store_history=False)
    finally:
        shell.showtraceback = show
    outcome.raise_error()


def debug_rank(
    state: ExtensionState, failures: Mapping[int, RankFailure], spec: RankSpec | None = None
) -> None:
    """Have the user examine the failure of a rank, by default that of the root cause."""
    from nbparallel.session.tasks.dispatch import debug_task

    if (session := state.running_session()) is None:
        raise UsageError("%debug: the ranks were ended, and their frames with them")
    try:
        chosen = (*failures,)[:1] if spec is None else spec.resolve(session.world_size, session.place.parts)
    except UsageError as error:
        raise UsageError(f"%debug: {error}") from None
    if not state.configuration.keep_frames:
        raise UsageError("%debug: no frames were kept: %config NbParallel.keep_frames = True keeps the next")
    rank = chosen[0]
    others = f"; -r takes one of {rank_list(failures)}" * (len(failures) > 1)
    if len(chosen) > 1 or rank not in failures:
        raise UsageError(f"%debug: {rank_list(chosen)}: there is one debugger, of a rank that raised{others}")
    if reason := session.place.no_input:
        raise UsageError(f"%debug: no user can be asked: {reason}")
    sink = state.new_output("stream", keep=False)
    task, timeout = debug_task(failures[rank].time_ns), state.configuration.timeout or None
    try:
        with brief_errors():
            session.perform(task, sink, ranks=(rank,), timeout=timeout)
    except ParallelError as error:
        raise UsageError(f"%debug on rank {rank}: {error.errors[rank]}{others}") from None
    except (KeyboardInterrupt, NbParallelError) as error:
        error.failures = failures  # type: ignore[union-attr]  # the next %debug is about these again
        raise
    finally:
        sink.finish()
