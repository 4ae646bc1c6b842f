"""``%debug`` after a cell that failed on ranks: the user examines the frames of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from nbparallel.errors import NbParallelError, ParallelError, rank_list
from nbparallel_magics.arguments import RankSpec
from nbparallel_magics.error_display import brief_errors
from nbparallel_magics.state import ExtensionState

if TYPE_CHECKING:
    from nbparallel.wire.messages import RankFailure


def debug_rank(
    state: ExtensionState, failures: Mapping[int, RankFailure], spec: RankSpec | None = None
) -> None:
    """Have the user examine the failure of a rank, by default that of the root cause."""
    from nbparallel.session.tasks.dispatch import debug_task

    if (session := state.running_session()) is None:
        raise UsageError("%debug: the ranks were ended, and their frames with them")
    try:
        chosen = (*failures,)[:1] if spec is None else spec.resolve(session.world_size, session.place.parts)
    except ValueError as error:
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
