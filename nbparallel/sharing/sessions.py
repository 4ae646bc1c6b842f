"""Sessions: whom a process tells about its segments, and what becomes of one that is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nbparallel.errors import ChannelClosedError
from nbparallel.sharing.broker import SegmentBroker


class Sessions:
    """The brokers of the sessions that a process is in.

    Parameters
    ----------
    on_gone : callable
        Called with a broker that cannot be reached any more; takes it off the list.
    """

    def __init__(self, on_gone: Callable[[SegmentBroker], None]) -> None:
        self.brokers: list[SegmentBroker] = []
        self._on_gone = on_gone

    def intend(self, path: str) -> None:
        """Announce a name to all before it exists.

        Raises
        ------
        ChannelClosedError
            This is a rank, and its session is gone: so will the rank be in a moment, and the name would stay.
        """
        for broker in list(self.brokers):
            try:
                broker.intend(path)
            except ChannelClosedError:
                self._on_gone(broker)
                if broker.client:
                    raise

    def removed(self, path: str) -> None:
        """Tell all that a name is gone."""
        for broker in list(self.brokers):
            self._say(broker, partial(broker.removed, path))

    def release(self, broker: SegmentBroker, known_as: int, memory: int = 0) -> None:
        """Tell one that this process does not use a segment any more; `memory` stays mapped here."""
        self._say(broker, partial(broker.release, known_as, memory))

    def forget(self, broker: SegmentBroker, known_as: int) -> None:
        """Tell one that this process does not use an own segment, and never will again."""
        self._say(broker, partial(broker.forget, known_as))

    def freed(self, broker: SegmentBroker, memory: int) -> None:
        """Tell one that an own memory has gone back to the system."""
        self._say(broker, partial(broker.freed, memory))

    def allow_write(self, broker: SegmentBroker, known_as: int) -> None:
        """Tell one that its other processes may write to a segment."""
        self._say(broker, partial(broker.allow_write, known_as))

    def _say(self, broker: SegmentBroker, say: Callable[[], None]) -> None:
        try:
            say()
        except ChannelClosedError:
            self._on_gone(broker)
