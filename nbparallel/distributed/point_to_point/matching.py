"""Posted receives: what `irecv` waits for, in the order in which it was called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.point_to_point.ring import Envelope
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.work import Work


@dataclass(slots=True)
class Receive:
    """One receive that was posted."""

    work: Work
    tensor: Any
    """What the user passed to be filled, and returns."""
    buffer: AnyArray | None
    """The same as a plain array."""
    src: int | None
    tag: int
    group: int
    sources: tuple[int, ...]
    """Who may be meant by None."""

    def matches(self, message: Envelope) -> bool:
        """Whether a message is for it."""
        mine = message.source in self.sources if self.src is None else message.source == self.src
        return mine and message.tag == self.tag and message.group == self.group


class PostedReceives:
    """The receives of one rank that have not been served yet.

    A message goes to the first of them that it matches, and to a blocking `recv` only if it matches none.

    Parameters
    ----------
    pending : callable
        Returns the messages that have arrived and were not taken, in order for each source.
    serve : callable
        Gives a message to a receive; errors are the receive's.
    """

    def __init__(
        self, pending: Callable[[], list[Envelope]], serve: Callable[[Receive, Envelope], None]
    ) -> None:
        self._pending, self._serve = pending, serve
        self._receives: list[Receive] = []

    def __bool__(self) -> bool:
        return bool(self._receives)

    def add(self, receive: Receive) -> None:
        """Post a receive."""
        self._receives.append(receive)

    def match(self) -> None:
        """Serve every receive whose message is here."""
        if not self._receives:
            return
        for receive in list(self._receives):
            message = next(filter(receive.matches, self._pending()), None)
            if message is not None:
                self._receives.remove(receive)
                self._serve(receive, message)

    def drop(self) -> None:
        """End all with the cell."""
        for receive in self._receives:
            receive.work.drop()
        self._receives.clear()


Form = Callable[[Envelope], tuple[Any, tuple[int, ...]] | None]


class UnexpectedMessages:
    """Which of one rank's messages are left from earlier cells.

    A message may be received in a later cell than it was sent in, so it is told of at the end of the second
    cell (or the third, if it arrived after the end of the first).
    """

    def __init__(self, sources: int) -> None:
        self._earlier = [0] * sources
        """The last message of each source that had arrived when the last cell ended."""
        self._told = [0] * sources

    def end_cell(
        self, pending: Sequence[Iterable[Envelope]], arrived: Sequence[int], form: Form
    ) -> list[str]:
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
        left: dict[tuple[int, int, int, str], list[Envelope]] = {}
        for source, messages in enumerate(pending):
            for message in messages:
                if self._told[source] < message.number <= self._earlier[source]:
                    key = source, message.tag, message.group, _described(form(message))
                    left.setdefault(key, []).append(message)
        self._told, self._earlier = self._earlier, list(arrived)
        return [_sentence(*key, messages) for key, messages in left.items()]


def _described(form: tuple[Any, tuple[int, ...]] | None) -> str:
    return "no array" if form is None else f"{form[0]} {form[1]}"


def _sentence(source: int, tag: int, group: int, described: str, messages: Sequence[Envelope]) -> str:
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
