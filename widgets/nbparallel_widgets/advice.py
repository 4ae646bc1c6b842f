"""Advice on a cell: what cost much time, how much, and what of this library does it better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nbparallel.session.monitoring.timeline import COMPUTING, MOVING, WAITING, Timeline
from nbparallel.wire.units import seconds_text, size_text

MOST = 3
"""Lines, the most costly first."""
SHARE = 0.1
"""Of the ranks' time: what costs less does not stand out."""
SHORTEST = 0.05
"""Seconds of a cell: in a shorter one nothing is worth a change."""
MANY, SMALL = 200, 4096
"""Operations of a rank, and their bytes on average."""
QUICK = 0.001
"""Seconds for one of them, waiting included: it is the calls that cost."""
LARGE = 1 << 20
"""Bytes."""
OFTEN = 3
"""Cells in a row."""


def advice(timeline: Timeline) -> list[str]:
    """Return at most three lines; none if nothing stands out."""
    if timeline.seconds < SHORTEST or any(row.died for row in timeline.rows):
        return []
    found = sorted(_found(timeline), reverse=True)
    return [text for share, text in found if share >= SHARE][:MOST]


def _found(timeline: Timeline) -> Iterator[tuple[float, str]]:
    """Yield what each rule says, with the share of the ranks' time that could be saved."""
    rows = timeline.rows
    times = [{kind: row.total(kind) for kind in (COMPUTING, WAITING, MOVING)} for row in rows]
    whole = sum(sum(kinds.values()) for kinds in times) or 1.0
    computing, waiting, moving = (sum(t[kind] for t in times) for kind in (COMPUTING, WAITING, MOVING))
    calls = sum(row.operations for row in rows)
    spans = [span for row in rows for span in row.spans if span.operation]
    nbytes = sum(span.nbytes for span in spans) / max(1, len(spans))
    small = calls >= MANY * len(rows) and nbytes <= SMALL and waiting + moving <= QUICK * calls
    if small:
        (name, line), _ = Counter((span.operation, span.line) for span in spans).most_common(1)[0]
        share = (waiting + moving) / whole
        text = f"{calls // len(rows):,} small operations a rank took {_percent(share)} of the time, mostly "
        yield share, f"{text}{name} on line {line}: collect values in an array, and call it once for all"
    if len(rows) > timeline.cpus > 0:
        lost, used = computing - timeline.cpu_seconds, timeline.cpu_seconds - SHARE * whole
        text = f"{len(rows)} ranks share {timeline.cpus} CPU{'s' * (timeline.cpus > 1)} and had none for "
        text += f"{_percent(lost / whole)} of the time: as many ranks as CPUs do as much"
        yield min(lost, used) / whole, text
    slowest = max(range(len(rows)), key=lambda i: times[i][COMPUTING])
    most, mean = times[slowest][COMPUTING], computing / len(rows)
    uneven = min((most - mean) * len(rows), waiting) / whole
    if not small:
        text = f"rank {rows[slowest].rank} computed {seconds_text(most)}, the mean is {seconds_text(mean)}: "
        yield uneven, f"{text}deal the work like cards (range(rank, n, world_size)), or let nbp.map deal it"
    if timeline.private_nbytes >= LARGE:
        text = (
            f"moving data took {_percent(moving / whole)} of the time, and ranks passed arrays of their own, "
        )
        text += f"{size_text(timeline.private_nbytes)} in all: those of nbp.zeros are combined where they lie"
        yield moving / whole, text
    for name, (size, cells) in timeline.copied.items():
        if cells >= OFTEN:
            text = f"{name} ({size_text(size)}) was copied for each of the last {cells} cells: "
            yield SHARE, f"{text}numbers in an array that you %share are never copied"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
