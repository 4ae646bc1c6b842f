"""`ParallelError`: one error made of the failures of all ranks, and its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nbparallel.errors import ParallelError, RankExitError, RemoteError, grouped, rank_list
from nbparallel.errors.questions import CAUSE, ask, text_of
from nbparallel.transfer.pickling import load_error
from nbparallel.wire.messages import Cause, RankFailure

_CONSEQUENCES = (Cause.PEER, Cause.INTERRUPT)
_LONGEST_MESSAGE = 500
"""Characters of one exception's text in the error's message; the whole text is in the traceback."""
_REPEATED = 100
"""Characters up to which a message that other ranks have as well is shown again."""


class RankTraceback(Exception):  # noqa: N818 - it is no error, it only carries text (as multiprocessing's)
    """The traceback of a rank as text: the ``__cause__`` of a rebuilt exception."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def build_parallel_error(
    errors: Mapping[int, RankFailure],
    freed: Mapping[int, str],
    result: Any = None,
) -> ParallelError:
    """Return the error of a cell in which ranks failed.

    Parameters
    ----------
    errors : Mapping[int, RankFailure]
        One for every rank that raised; at least one.
    freed : Mapping[int, str]
        Ranks that were interrupted because another one had failed, with where: ``", line 5"``, or nothing.
    result : CellResult, optional
        What there was.
    """
    order = _in_order(errors.values())
    exceptions = {failure.rank: rebuild(failure) for failure in order}
    error = ParallelError(summary(order, freed), exceptions, result=result)
    error.failures = {failure.rank: failure for failure in order}
    error.rendering = (*render(order, freed), f"ParallelError: {summary(order, freed, with_text=False)}")
    return error


def _in_order(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Put the root cause first (what failed by itself, earliest), then all like it, and consequences last."""
    by_rank = sorted(failures, key=lambda failure: failure.rank)
    own = [failure for failure in by_rank if failure.cause not in _CONSEQUENCES]
    root = min(own or by_rank, key=lambda failure: failure.time_ns)
    return sorted(by_rank, key=lambda f: (f.cause in _CONSEQUENCES, not _like(f, root)))


def _like(failure: RankFailure, root: RankFailure) -> bool:
    """Whether a person would call it the same failure: same text, or same way (texts often hold the rank)."""
    if (failure.ename, failure.cause) != (root.ename, root.cause):
        return False
    return failure.evalue == root.evalue or (bool(root.frames) and failure.frames == root.frames)


def rebuild(failure: RankFailure) -> Exception:
    """Return the rank's exception, or a `RemoteError` that describes it."""
    exception: Any = None
    reason = "it cannot be pickled"
    if failure.exception is not None:
        try:
            exception = load_error(failure.exception)
            reason = "it is no Exception"
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ or __init__ raises
            reason = f"it cannot be rebuilt here ({type(error).__name__}: {_one_line(text_of(error), 200)})"
    kind = type(exception)  # no `isinstance`: it would believe the user's `__class__`
    if issubclass(kind, SystemExit):
        code = ask(lambda: exception.code, lambda: None)
        shown = ask(lambda: repr(code), lambda: "…")
        exception = RankExitError(f"rank {failure.rank} called sys.exit({shown})", code=code)
    elif not issubclass(kind, Exception):
        text = f"{failure.ename}: {failure.evalue}" if failure.evalue else failure.ename
        exception = RemoteError(f"{text} [{reason}]", ename=failure.ename, evalue=failure.evalue)
    CAUSE.__set__(exception, RankTraceback("\n".join(["", *full_text(failure)])))
    return exception  # type: ignore[no-any-return]  # what a user's pickle makes has no static type


def summary(order: Sequence[RankFailure], freed: Mapping[int, str], *, with_text: bool = True) -> str:
    """Return one line: the root cause, the ranks that share it, other failed ranks, released ranks."""
    root = order[0]
    same = [f for f in order if _like(f, root)]
    others = [f for f in order if not _like(f, root) and f.cause not in _CONSEQUENCES]
    freed_ranks = {f.rank for f in order if f.cause in _CONSEQUENCES and not _like(f, root)} | set(freed)
    freed_ranks -= {f.rank for f in [*same, *others]}
    remarks = []
    if with_text and any(f.evalue != root.evalue for f in same):
        remarks.append(f"on rank {root.rank}; the others' texts differ")
    remarks += [
        f"also {name} on {rank_list(ranks)}"
        for name, ranks in grouped((f.ename, f.rank) for f in others).items()
    ]
    if freed_ranks:
        remarks.append(f"{rank_list(freed_ranks)} {'was' if len(freed_ranks) == 1 else 'were'} released")
    text = _one_line(root.evalue, _LONGEST_MESSAGE) if with_text else ""
    if root.cause is Cause.DIED and len(same) == 1 and text:
        head = f"{root.ename}: {text}"  # the text names rank and line itself
    else:
        head = f"{root.ename} on {rank_list(f.rank for f in same)}{_items_of(same)}{lines_of(same)}"
        head += f": {text}" if text else ""
    return head + (f" ({'; '.join(remarks)})" if remarks else "")


def lines_of(failures: Iterable[RankFailure]) -> str:
    """Return ``", line 5"``, ``", lines 2, 5"`` or ``", line 5 of steps.py"``; nothing if none is known."""
    lines = grouped((_file_label(failure), failure.line) for failure in failures if failure.line is not None)
    text = ""
    for label, found in sorted(lines.items()):
        text += f", line{'s' * (len(set(found)) > 1)} {', '.join(map(str, sorted(set(found))))}"
        text += f" of {label}" if label else ""
    return text


def _file_label(failure: RankFailure) -> str:
    """Return what messages call the file of a failure's line: ``steps.py``; empty: the cell or script."""
    outermost = failure.frames[0]
    return "" if outermost.function == "<module>" else outermost.filename.rpartition("/")[2]


def _items_of(failures: Iterable[RankFailure]) -> str:
    """Return ``", item 7 ('abc')"``, of several failures all; nothing if no function was mapped."""
    return "".join(f", {failure.item}" for failure in failures if failure.item)


def whereabouts(unfinished: Mapping[int, RankFailure]) -> str:
    """Return where stopped ranks were: ``: rank 0 on line 5, ranks 1-2 on line 7``, or nothing."""
    by_place = grouped((lines_of([failure]).removeprefix(", "), rank) for rank, failure in unfinished.items())
    places = sorted(by_place.items(), key=itemgetter(1))
    text = ", ".join(f"{rank_list(ranks)} on {place}" for place, ranks in places if place)
    return f": {text}" if text else ""


def _one_line(text: str, longest: int) -> str:
    first, *rest = text.strip().splitlines() or [""]
    cut = first[:longest].rstrip()
    if rest and cut.endswith(":") and ";" in cut:
        return cut[: cut.rindex(";")]  # it would announce what is not there
    return cut + (" …" if rest or len(first) > longest else "")


def render(order: Sequence[RankFailure], freed: Mapping[int, str]) -> list[str]:
    """Return the parts of a traceback for a person: equal ones once, consequences in a line."""
    parts: list[str] = []
    read: set[str] = set()
    for group in _alike([f for f in order if f.cause not in _CONSEQUENCES]):
        parts.append(f"[{rank_list(f.rank for f in group)}{_items_of(group)}]")
        parts.extend(_above_the_message(group))
        message = _message_lines(group)
        parts.append(f"{group[0].ename}: the same as above" if message in read else message)
        if len(message) > _REPEATED:
            read.add(message)
    consequences = [f for f in order if f.cause in _CONSEQUENCES]
    shown = {f": {f.evalue}" for f in order if f.cause not in _CONSEQUENCES and f.evalue}
    for group in _alike(consequences):
        ranks, text = rank_list(f.rank for f in group), group[0].evalue
        if repeated := next((part for part in shown if text.endswith(part)), ""):
            text = text.removesuffix(repeated)
        parts.append(f"[{ranks}]{lines_of(group)}: {group[0].ename}: {_one_line(text, 200)}")
    raised = {f.rank for f in order}
    for where in sorted({place for rank, place in freed.items() if rank not in raised}):
        ranks = rank_list(rank for rank, place in freed.items() if place == where and rank not in raised)
        parts.append(f"[{ranks}]{where}: released by an interrupt after another rank had failed")
    return parts


def _alike(failures: Iterable[RankFailure]) -> list[list[RankFailure]]:
    """Group failures that came the same way; their texts may differ (they often hold the rank)."""

    def way(failure: RankFailure) -> tuple[Any, ...]:
        text = failure.evalue if failure.cause in _CONSEQUENCES else ""
        return failure.ename, failure.cause, failure.frames or failure.evalue, _skeleton(failure), text

    return list(grouped((way(failure), failure) for failure in failures).values())


def _skeleton(failure: RankFailure) -> tuple[str, ...]:
    """Return a traceback's parts without those in one line: messages of what led to the last exception."""
    above = (part.strip("\n") for part in failure.traceback[:-1])
    return tuple(part if "\n" in part or _HEAD in part else "" for part in above)


_HEAD = "Traceback (most recent call last)"
"""Stands in IPython's line that names an exception above its frames."""


def _above_the_message(group: Sequence[RankFailure]) -> list[str]:
    """Return a group's traceback up to the message; where ranks' texts of causes differ, those of all."""
    parts = []
    for texts in zip(*(full_text(failure)[:-1] for failure in group), strict=True):
        ranks = grouped((text, failure.rank) for failure, text in zip(group, texts, strict=True))
        several = [f"{rank_list(some)}: {text}" for text, some in ranks.items()]
        parts.append(texts[0] if len(ranks) == 1 else "\n".join(several))
    return parts


def _message_lines(group: Sequence[RankFailure]) -> str:
    texts = grouped((failure.evalue, failure) for failure in group)
    if len(texts) == 1:
        return full_text(group[0])[-1]
    return "\n".join(f"{rank_list(f.rank for f in some)}: {_message(some[0])}" for some in texts.values())


def _message(failure: RankFailure) -> str:
    return f"{failure.ename}: {failure.evalue}" if failure.evalue else failure.ename


def full_text(failure: RankFailure) -> list[str]:
    """Return the whole traceback of one rank, one string a part, the message last."""
    if failure.traceback:
        return list(failure.traceback)
    parts = []
    for frame in failure.frames:
        where = f"Cell {frame.filename}" if frame.filename.startswith("In[") else f"File {frame.filename}"
        function = "" if frame.function == "<module>" else f", in {frame.function}"
        parts.append(
            f"{where}, line {frame.line}{function}" + (f"\n    {frame.source}" if frame.source else "")
        )
    return [*parts, _message(failure)]
