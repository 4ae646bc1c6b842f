"""Messages that a cell has sent and no later one receives: told once, since a recv was probably forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nbparallel.distributed.point_to_point.ring import Message

Form = Callable[[Message], tuple[Any, tuple[int, ...]] | None]


class Unreceived:
    """Which of one rank's messages are left from earlier cells.

    A message may be received in a later cell than it was sent in, so it is told of at the end of the second
    cell (or the third, if it arrived after the end of the first).
    """

    def __init__(self, sources: int) -> None:
        self._earlier = [0] * sources
        """The last message of each source that had arrived when the last cell ended."""
        self._told = [0] * sources

    def end_cell(self, pending: Sequence[Iterable[Message]], arrived: Sequence[int], form: Form) -> list[str]:
        """Return what to tell the user, in words.

        Parameters
        ----------
        pending : sequence
            The messages of each source that nobody has received.
        arrived : sequence of int
            The number of the last message of each source.
        form : callable
            Returns dtype and shape of a message, None for what is no array.
        """
        left: dict[tuple[int, int, int, str], list[Message]] = {}
        for source, messages in enumerate(pending):
            for message in messages:
                if self._told[source] < message.number <= self._earlier[source]:
                    key = source, message.tag, message.group, _described(form(message))
                    left.setdefault(key, []).append(message)
        self._told, self._earlier = self._earlier, list(arrived)
        return [_sentence(*key, messages) for key, messages in left.items()]


def _described(form: tuple[Any, tuple[int, ...]] | None) -> str:
    return "no array" if form is None else f"{form[0]} {form[1]}"


def _sentence(source: int, tag: int, group: int, described: str, messages: Sequence[Message]) -> str:
    line = f"on line {messages[0].line} " if messages[0].line else ""
    many, were, them = ("a message", "was", "it")
    if len(messages) > 1:
        many, were, them = (f"{len(messages)} messages", "were", "them")
    what, call = (f"{described}, tag {tag}", f", tag={tag}") if tag else (described, "")
    if group:
        what, call = f"{what}, in a group", f"{call}, group=…"
    return (
        f"{many} from rank {source} ({what}), sent {line}in an earlier cell, {were} not received: "
        f"recv(src={source}{call}) still takes {them}"
    )
