"""What a panel says first: what stands out of a cell, from sums since it began, in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from nbparallel.distributed.tracing.profiling.profile import WORTH
from nbparallel.errors import LEFT_OUT, rank_list
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets.panel_course import Course
from nbparallel_widgets.timeline_text import stands_out

_ABSENT = re.compile(rf"ranks? (\d[-\d, ]*) (?={LEFT_OUT} )")
"""Begins the error about ranks that left a call out."""
LONGEST = 160
"""Characters of an error in a title; a deadlock of many ranks has more."""
GETTING_READY = ("none", "starting", "moving")


def verdict(activity: SessionActivity, course: Course) -> str:
    """Return what stands out: ``rank 2 holds the others up: they wait for it 66 % of their time``."""
    match activity.phase:
        case "none":
            return f"{ranks_text(activity.ranks)}: no cell has run yet"
        case "starting":
            count = activity.starting_ranks
            return f"starting {count} rank{'s' * (count != 1)}"
        case "moving":
            size = size_text(activity.moving_nbytes)
            return f"moving {size} of `{activity.moving_name}` into shared memory"
        case "interrupted":
            return "interrupted"
        case "failed":
            return _failed(activity)
    if failed := [rank for rank in activity.ranks if took_part(rank) and rank.state in ("failed", "dead")]:
        return _ended_badly(failed[0])
    running = activity.phase == "running"
    if activity.items:
        done = sum(rank.items for rank in activity.ranks)
        return f"{done:,}" + f" of {activity.items:,}" * (activity.items > 0) + " items done"
    waiting, whole = _waiting(activity.ranks), _whole(activity.ranks)
    if (rank := held_up_by(activity, course)) >= 0:
        others = [other for other in activity.ranks if other.rank != rank]
        share = min(_awaited(activity, course)[rank], _waiting(others)) / (_whole(others) or 1)
        what = "holds the others up: they wait" if running else "held the others up: they waited"
        return f"rank {rank} {what} for it {share:.0%} of their time".replace("%", " %")
    if whole and waiting >= WORTH * whole:
        verb = "is" if running else "was"
        return f"no rank stands out: {waiting / whole:.0%} of the time {verb} waiting".replace("%", " %")
    if running and any(rank.operations is None for rank in activity.ranks if took_part(rank)):
        return "the ranks call many short operations; how long they wait is known later"
    if running:
        return "the ranks compute" if whole else "the cell begins"
    return "finished" + (
        f": {waiting / whole:.0%} of the time was waiting".replace("%", " %") if whole else ""
    )


def held_up_by(activity: SessionActivity, course: Course) -> int:
    """Return the rank that others waited for in more than half of all their waiting; -1: none stands out."""
    return stands_out(_awaited(activity, course), _waiting(activity.ranks), _whole(activity.ranks))


def _awaited(activity: SessionActivity, course: Course) -> dict[int, float]:
    """Return for how long each rank was waited for: as the ranks noted it, or as it was seen."""
    noted = {rank: sum(row[rank] for row in activity.waited) for rank in range(len(activity.waited))}
    seen = course.awaited if course.began_ns == activity.began_ns else {}
    return noted if sum(noted.values()) > _waiting(activity.ranks) / 2 else dict(seen)


def marked_ranks(activity: SessionActivity, course: Course) -> frozenset[int]:
    """Return the ranks that the sentence is about: the others wait for them, or the cell failed there."""
    if activity.phase == "failed":
        if absent := _ABSENT.match(activity.failed_between):
            named = absent[1].replace(" ", "").split(",")
            spans = (part.partition("-") for part in named)
            return frozenset(n for a, _, b in spans for n in range(int(a), int(b or a) + 1))
        return frozenset() if activity.failed_between else frozenset({activity.failed_rank} - {-1})
    if activity.phase in GETTING_READY:
        return frozenset()
    bad = {rank.rank for rank in activity.ranks if rank.state in ("failed", "dead") and took_part(rank)}
    return frozenset(bad or {held_up_by(activity, course)} - {-1})


def took_part(rank: RankActivity) -> bool:
    """Return whether the cell that runs, or ran last, is or was on this rank."""
    return rank.state not in ("idle", "starting", "unseen") or bool(
        rank.computing or rank.waiting or rank.moving or rank.finished
    )


def when(activity: SessionActivity) -> str:
    """Return which cell it is and how far it is: ``In[27] runs · 11.6 s``."""
    if activity.phase in GETTING_READY:
        return ""
    cell = f"In[{activity.number}]" if activity.number else "a call" if activity.running else "the last call"
    time = f"{activity.seconds:.1f} s" if activity.seconds >= 1 else seconds_text(activity.seconds)
    return f"{cell} runs · {time}" if activity.running else f"{cell} {activity.phase} after {time}"


def _failed(activity: SessionActivity) -> str:
    if between := activity.failed_between:
        return between[:LONGEST] + " …" * (len(between) > LONGEST)
    failed = next((rank for rank in activity.ranks if rank.rank == activity.failed_rank), None)
    if failed is None:
        return "the cell failed"
    alike = [rank for rank in activity.ranks if rank.state == "failed"]
    more = f", the first of {ranks_text(alike)} that failed" if failed in alike and len(alike) > 1 else ""
    return _ended_badly(replace(failed, line=activity.failed_line)) + more


def _ended_badly(rank: RankActivity) -> str:
    line = f" on line {rank.line}" if rank.line else ""
    if rank.state != "dead":
        return f"rank {rank.rank} failed{line}"
    how, colon, why = (rank.operation or "died").partition(":")
    return f"rank {rank.rank} {how}{line}{colon}{why}"


def _waiting(ranks: Iterable[RankActivity]) -> float:
    return sum(rank.waiting for rank in ranks)


def _whole(ranks: Iterable[RankActivity]) -> float:
    return sum(map(spent, ranks))


def spent(rank: RankActivity) -> float:
    """Return the seconds that a rank has spent in the cell."""
    return rank.computing + rank.waiting + rank.moving


def ranks_text(ranks: Iterable[RankActivity]) -> str:
    """Return their numbers: ``ranks 0-1, 3``."""
    return rank_list([rank.rank for rank in ranks])


def progress(activity: SessionActivity, course: Course) -> str:
    """Return how far a map is, and on which lines of the cell ranks are."""
    parts = []
    if activity.items:
        done = sum(rank.items for rank in activity.ranks)
        if activity.running and done and activity.items > 0:
            left = activity.seconds * (activity.items / done - 1)
            parts.append(f"about {seconds_text(max(1.0, round(left)))} left")
        seconds, item = course.slowest
        if item >= 0 and seconds >= 1:
            parts.append(f"the slowest took {seconds:.1f} s: item {item}")
    if activity.running and (bars := [rank for rank in activity.ranks if rank.step < rank.steps]):
        last = max(bars, key=lambda rank: rank.seconds_left)
        parts.append(f"step {last.step:,} of {last.steps:,} (rank {last.rank})")
        parts.append(f"about {seconds_text(max(1.0, round(last.seconds_left)))} left")
    loops = {(rank.line, rank.last_line) for rank in activity.ranks if rank.last_line > rank.line}
    if len(loops) == 1:
        parts.append("in lines {}-{}".format(*(loop := loops.pop())))
        seen = {line: count for (first, line), count in course.lines.items() if first == loop[0] and line}
        mostly = [line for line, count in seen.items() if count > sum(seen.values()) / 2]
        parts[-1] += f", mostly at line {mostly[0]}" if mostly else ""
    return " · ".join(parts)
