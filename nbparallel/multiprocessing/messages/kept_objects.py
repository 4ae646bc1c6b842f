"""KeptObject: one message that several new processes open."""

from __future__ import annotations

from typing import Any

from nbparallel.multiprocessing.messages.exchange import current_membership, join_household, supervised
from nbparallel.multiprocessing.messages.parcels import INLINE, open_message, pack_kept


class KeptObject:
    """An object as a message that the sender keeps, which any number of processes open.

    Its large private arrays are written into shared memory once, and mapped copy-on-write by each.

    Raises
    ------
    UnpicklableError
        A part cannot be sent: locks and queues cannot, because each process gets its own copy of these.
    """

    def __init__(self, content: Any) -> None:
        member = join_household()
        with supervised():
            self._data, self._kept = pack_kept(content, member)
        self._parcel = INLINE if member is None else 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._data, self._parcel)

    def open(self) -> Any:
        """Return the object, in a process whose sender still keeps the message."""
        with supervised():
            return open_message(self._data, current_membership(), inline=self._parcel == INLINE)


def _rebuild(data: bytes, parcel: int) -> KeptObject:
    made = KeptObject.__new__(KeptObject)
    made._data, made._kept, made._parcel = data, None, parcel
    return made
