"""``%parallel_status``: the ranks and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbparallel.errors.text.table import Table
from nbparallel.wire.messages import MOST_FRAME_NBYTES
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_magics.views.segments import total

if TYPE_CHECKING:
    from nbparallel.session.monitoring.activity import RankActivity
    from nbparallel.session.monitoring.statistics import SessionStatistics


def status_table(seen: SessionStatistics) -> Table:
    """Return a row for each rank, and below them what is shared, of how much."""
    rows = [
        (str(rank.rank), rank.host, rank.state, _doing(rank), *_times(rank), *_process(rank))
        for rank in seen.ranks
    ]
    of = "; times and operations are of the last cell" * any(any(_times(rank)) for rank in seen.ranks)
    where = " on each host" * any(rank.host for rank in seen.ranks)
    room = "" if seen.free_nbytes is None else f", {size_text(seen.free_nbytes)} more would fit{where}"
    kept = (
        f"; frames of failed cells, for %debug, hold {size_text(seen.frames_nbytes)}: each rank's at most "
        f"{size_text(MOST_FRAME_NBYTES)}, until its next cell"
    ) * bool(seen.frames_nbytes)
    return Table(
        f"{len(rows)} rank{'s' * (len(rows) != 1)}, started by {seen.start_method}{of}",
        (
            "rank", "host", "state", "in", "computing", "waiting", "moving", "operations", "own memory",
            "shared pages", "threads", "pid",
        ),
        rows,
        f"shared memory ({seen.strategy}): {total(seen)}{room}; open files of the notebook: "
        f"{seen.descriptors} of {seen.descriptor_limit}{kept}",
    ).without_empty_columns()  # fmt: skip


def _process(rank: RankActivity) -> tuple[str, ...]:
    """Return what its process uses; nothing if that cannot be seen."""
    if not rank.pid:
        return ("",) * 4
    memory = size_text(rank.private_nbytes), size_text(rank.mapped_nbytes)
    return (*memory, str(rank.threads), str(rank.pid))


def _times(rank: RankActivity) -> tuple[str, ...]:
    """Return where the rank's time in the last cell has gone; nothing if it took no part."""
    seconds = (rank.computing, rank.waiting, rank.moving)
    if not any(seconds):
        return ("",) * 4
    operations = "" if rank.operations is None else f"{rank.operations:,}"
    return (*map(seconds_text, seconds), operations)


def _doing(rank: RankActivity) -> str:
    if not rank.operation:
        return ""
    return f"{rank.operation}, line {rank.line}" if rank.line else rank.operation
