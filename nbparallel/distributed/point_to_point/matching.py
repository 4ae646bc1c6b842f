"""Posted receives: what `irecv` waits for, in the order in which it was called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.point_to_point.ring import Message
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

    def matches(self, message: Message) -> bool:
        """Whether a message is for it."""
        mine = message.source in self.sources if self.src is None else message.source == self.src
        return mine and message.tag == self.tag and message.group == self.group


class Posted:
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
        self, pending: Callable[[], list[Message]], serve: Callable[[Receive, Message], None]
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
