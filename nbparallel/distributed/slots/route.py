"""Route: the way that the bytes of a large collective take, decided alike by all members."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from nbparallel.distributed.slots.fingerprint import DIRECT, READABLE


class Route(enum.Enum):
    """The way of the bytes of one collective."""

    INLINE = enum.auto()
    """Through the slots."""
    STAGED = enum.auto()
    """Through the staging buffers, a chunk at a time."""
    DIRECT = enum.auto()
    """Between the arrays themselves, which all lie in shared memory."""
    IN_PLACE = enum.auto()
    """Out of the arrays themselves, which are all private, and which others read."""


def choose_route(bits: Sequence[int], *, fits: bool) -> Route:
    """Return the route of a collective.

    Parameters
    ----------
    bits : sequence of int
        What each member offers, as all members read it: `DIRECT` if others can access its array, `READABLE`
        if they can read it where it lies.
    fits : bool
        Whether an array fits into a slot.
    """
    if all(offer & DIRECT for offer in bits):
        return Route.DIRECT
    if all(offer & READABLE for offer in bits):
        return Route.IN_PLACE
    return Route.INLINE if fits else Route.STAGED


def offers_differ(bits: Sequence[int]) -> bool:
    """Return whether members offer different ways: some slots then hold what is not used."""
    ways = {offer & (DIRECT | READABLE) for offer in bits}
    return len(ways) > 1
