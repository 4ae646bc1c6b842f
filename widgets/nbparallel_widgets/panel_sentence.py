"""What a session does at one moment, in one sentence; and what one rank does, in a few words.

The ranks that the sentence is about stand between two asterisks: ``ranks 0, 2 wait for **rank 1**``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nbparallel.errors import LEFT_OUT, rank_list
from nbparallel.errors.text.escaping import escape_html
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.wire.units import seconds_text, size_text

_STRONG = re.compile(r"\*\*(.+?)\*\*")
_ABSENT = re.compile(rf"ranks? \d[-\d, ]* (?={LEFT_OUT} )")
"""Begins the error about ranks that left a call out."""
_CODE = re.compile(r"`(.+?)`")
_VERBS = {
    "failed": ("has failed", "have failed"),
    "dead": ("is dead", "are dead"),
    "unseen": ("is not seen", "are not seen"),
    "computing": ("computes", "compute"),
    "moving": ("moves data", "move data"),
    "waiting": ("waits", "wait"),
    "starting": ("starts", "start"),
    "finished": ("has finished", "have finished"),
    "interrupted": ("was interrupted", "were interrupted"),
    "released": ("was released", "were released"),
}
"""What one rank and several ranks do, in the order of the sentence."""
_BAD = ("failed", "dead")
LONGEST = 160
"""Characters of an error in a title; a deadlock of many ranks has more."""


def sentence(activity: SessionActivity) -> str:
    """Return what happens now, or how the last cell ended: ``In[3]: finished after 2.0 s``."""
    cell = f"In[{activity.number}]: " if activity.number else ""
    after = f"after {span_text(activity.seconds)}"
    match activity.phase:
        case "none":
            return f"{_ranks(activity.ranks)}: no cell has run yet"
        case "starting":
            count = activity.starting_ranks
            return f"starting {count} rank{'s' * (count != 1)}"
        case "moving":
            size = size_text(activity.moving_nbytes)
            return f"moving {size} of `{activity.moving_name}` into shared memory"
        case "running":
            return (cell or "a call: ") + _running(activity)
        case "failed":
            return (cell or "the last call ") + _failed(activity, after)
        case "interrupted":
            return f"{cell or 'the last call was '}interrupted {after}"
    return f"{cell or 'the last call '}finished {after}{_longest_wait(activity)}"


def plain(text: str) -> str:
    """Return a sentence as text."""
    return _STRONG.sub(r"\1", text)


def marked_html(text: str) -> str:
    """Return a sentence as HTML."""
    return _CODE.sub(r"<code>\1</code>", _STRONG.sub(r"<b>\1</b>", escape_html(text)))


def marked_ranks(activity: SessionActivity) -> frozenset[int]:
    """Return the ranks that the sentence is about: the others wait for them, or the cell failed there."""
    if activity.phase == "running":
        return frozenset(activity.culprits) | {rank.rank for rank in activity.ranks if rank.state in _BAD}
    if activity.phase != "failed":
        return frozenset()
    if _ABSENT.match(activity.failed_between):
        return frozenset(r.rank for r in activity.ranks if took_part(r) and r.state in ("idle", "finished"))
    return frozenset() if activity.failed_between else frozenset({activity.failed_rank} - {-1})


def rank_text(rank: RankActivity, activity: SessionActivity) -> str:
    """Return what a rank does: ``waiting for rank 2 in all_reduce, line 3``."""
    if rank.state == "unseen":
        return rank.operation
    if rank.state == "dead":
        return f"{_cause(rank)}; the next cell starts it again"
    if rank.state == "idle":
        if activity.phase not in ("finished", "failed", "interrupted"):
            return "idle"
        if not took_part(rank):
            return "took no part"
    text = {"moving": "moving data", "idle": "finished"}.get(rank.state, rank.state)
    if rank.state in ("idle", "finished") and rank.finished:
        text += f" after {span_text(rank.finished)}"
    if rank.state == "waiting" and rank.waits_for:
        text += f" for {rank_list(rank.waits_for)}"
    if rank.operation and rank.state in ("waiting", "moving"):
        text += f" in {rank.operation}"
    if rank.rank == activity.failed_rank and activity.failed_line:
        text += f", line {activity.failed_line}"
    elif rank.line and rank.state != "finished":
        text += f", {_lines(rank)}"
    if activity.phase == "running" and rank.rank in activity.culprits:
        text += "; others wait for it"
    return text


def took_part(rank: RankActivity) -> bool:
    """Return whether the cell that runs, or ran last, is or was on this rank."""
    return rank.state not in ("idle", "starting", "unseen") or bool(
        rank.computing or rank.waiting or rank.moving or rank.finished
    )


def span_text(seconds: float) -> str:
    """Return a time whose digits stay in their places while it grows."""
    return f"{seconds:.1f} s" if seconds >= 1 else seconds_text(seconds)


def _running(activity: SessionActivity) -> str:
    taking_part = [rank for rank in activity.ranks if took_part(rank)]
    waiting = [rank for rank in taking_part if rank.state == "waiting"]
    blocked = [rank for rank in waiting if rank.rank not in activity.culprits]
    if blocked and activity.culprits:
        longest = max(rank.seconds for rank in blocked)
        return f"{_do(blocked, 'waiting')} for {_culprits(activity, longest)}"
    if waiting and len(waiting) == len(taking_part):
        each_other = {rank for one in waiting for rank in one.waits_for} <= {rank.rank for rank in waiting}
        known = each_other and all(rank.waits_for for rank in waiting)
        longest = max(rank.seconds for rank in waiting)
        return f"{_do(waiting, 'waiting')}{' for each other' * known}, for {span_text(longest)}"
    parts = [
        _do(group, state)
        for state in _VERBS
        if (group := [rank for rank in taking_part if rank.state == state])
    ]
    return f"{'; '.join(parts) or 'it begins'}; {span_text(activity.seconds)} so far"


def _culprits(activity: SessionActivity, longest: float) -> str:
    """Return the ranks that are waited for, what they do, and for how long."""
    ranks = [rank for rank in activity.ranks if rank.rank in activity.culprits]
    name = f"**{_ranks(ranks)}**"
    if len(ranks) != 1:
        return f"{name}, for {span_text(longest)}"
    (rank,) = ranks
    line = f"{_lines(rank)}, " if rank.line else ""
    doing = _cause(rank) if rank.state == "dead" else rank.state
    return f"{name} ({line}{doing} for {span_text(rank.seconds or longest)})"


def _lines(rank: RankActivity) -> str:
    """Return the line that a rank is on, or those of the statement that it computes: perhaps a loop."""
    return f"lines {rank.line}-{rank.last_line}" if rank.last_line > rank.line else f"line {rank.line}"


def _failed(activity: SessionActivity, after: str) -> str:
    if between := activity.failed_between:
        absent = _ABSENT.match(between)
        end = absent.end() - 1 if absent else 0
        rest = between[end:LONGEST] + " …" * (len(between) > LONGEST)
        return f"failed {after}: " + (f"**{between[:end]}**" if end else "") + rest
    failed = next((rank for rank in activity.ranks if rank.rank == activity.failed_rank), None)
    if failed is None:
        return f"failed {after}"
    if failed.state == "dead":
        return f"failed {after}: **rank {failed.rank}** {_was(failed)}"
    line = f", line {activity.failed_line}," if activity.failed_line else ""
    alike = [rank for rank in activity.ranks if rank.state == "failed"]
    if failed in alike and len(alike) > 1:
        return f"failed on {_ranks(alike)}, first on **rank {failed.rank}**{line or ','} {after}"
    return f"failed on **rank {failed.rank}**{line} {after}"


def _longest_wait(activity: SessionActivity) -> str:
    """Return which rank waited longest, if that was a tenth of the cell or more."""
    waits = [
        (seconds, rank, awaited)
        for rank, row in enumerate(activity.waited)
        for awaited, seconds in enumerate(row)
        if rank != awaited
    ]
    seconds, rank, awaited = max(waits, default=(0.0, 0, 0), key=lambda wait: wait[0])
    if not seconds or seconds < activity.seconds / 10:
        return ""
    return f"; the longest wait: rank {rank} for **rank {awaited}**, {span_text(seconds)}"


def _do(ranks: list[RankActivity], state: str) -> str:
    mark = "**" if state in _BAD else ""
    return f"{mark}{_ranks(ranks)}{mark} {_VERBS[state][len(ranks) != 1]}"


def _ranks(ranks: Iterable[RankActivity]) -> str:
    return rank_list([rank.rank for rank in ranks])


def _was(rank: RankActivity) -> str:
    return rank.operation.partition(":")[0] or "died"


def _cause(rank: RankActivity) -> str:
    return _was(rank).removeprefix("was ")
