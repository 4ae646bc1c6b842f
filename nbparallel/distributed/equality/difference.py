"""The first difference between ranks: which ranks hold other data than most, and where.

`assert_same` gets here once digests have differed.  Every rank works from what all have sent, so all of them
go through the same steps and raise the same error.  Of arrays only the chunks whose checksums differ travel,
at most `MAX_CHUNKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.equality.flatten import DIGEST, Differences, Leaf, chunk_of, flatten
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.errors import DifferentDataError, rank_list

Tell = Callable[[Any], list[Any]]
"""Sends this rank's value to all, and returns the values of all ranks, in the order of the group."""
MAX_GROUPS = 8
"""Of ranks that are described; the others are only named."""
MAX_CHUNKS = 16
"""Chunks of one array that are sent to be compared; differing elements in further ones are not counted."""


@dataclass(slots=True)
class DifferingRanks:
    """Members that hold the same as each other, and not what the reference does."""

    members: list[int]
    leaf: int
    """The first that differs."""
    chunks: Sequence[int] = ()
    """The first `MAX_CHUNKS` of its chunks that differ, if it is an array of the same form on both sides."""
    partial: bool = False
    """Whether further ones differ."""


def find_difference(x: Any, ranks: Sequence[int], index: int, tell: Tell) -> DifferentDataError | None:
    """Return what is to be raised on every rank, None if all hold the same after all.

    Parameters
    ----------
    ranks : sequence of int
        The members of the group.
    index : int
        Which of them this is.
    """
    mine = flatten(x, exact=False)
    all_digests: list[bytes] = tell(b"".join(leaf.digest for leaf in mine))
    groups: dict[bytes, list[int]] = {}
    for index_in_group, digests in enumerate(all_digests):
        groups.setdefault(digests, []).append(index_in_group)
    if len(groups) == 1:
        return None
    same = max(groups.values(), key=len)
    others = [
        DifferingRanks(members, _first(all_digests[same[0]], all_digests[members[0]]))
        for members in groups.values()
        if members is not same
    ]
    described = others[:MAX_GROUPS]
    places = {other.leaf for other in described}
    leaves = tell({i: _described(mine[i]) for i in places if i < len(mine)})
    found = _compare(mine, described, same[0], index, leaves, tell)
    texts = [_text(other, found.get(other.members[0]), leaves, same, ranks) for other in described]
    if len(others) > len(described):
        rest = [ranks[i] for other in others[MAX_GROUPS:] for i in other.members]
        texts.append(f"so {'do' if len(rest) > 1 else 'does'} {rank_list(rest)}")
    agree = f"{rank_list(ranks[i] for i in same)} agree; " if len(same) > 1 else ""
    return DifferentDataError(
        f"not all ranks hold the same data: {agree}{'; '.join(texts)}",
        groups=tuple(tuple(ranks[i] for i in part) for part in [same, *(other.members for other in others)]),
    )


def _first(digests: bytes, others: bytes) -> int:
    """Return the first leaf that differs."""
    for start in range(0, min(len(digests), len(others)), DIGEST):
        if digests[start : start + DIGEST] != others[start : start + DIGEST]:
            return start // DIGEST
    return min(len(digests), len(others)) // DIGEST


def _described(leaf: Leaf) -> tuple[str, str, Any, bytes]:
    """Return path, words, form of the array, and the checksums of its chunks."""
    array = leaf.array
    return leaf.path, str(leaf), None if array is None else (str(array.dtype), array.shape), leaf.checksums


def _compare(
    mine: list[Leaf],
    others: list[DifferingRanks],
    reference: int,
    index: int,
    leaves: list[dict[int, tuple[str, str, Any, bytes]]],
    tell: Tell,
) -> dict[int, Differences]:
    """Return, by the first member of each other group, where its elements differ from the reference's."""
    for other in others:
        _, _, form, checksums = leaves[reference].get(other.leaf, ("", "", None, b""))
        _, _, its_form, its_checksums = leaves[other.members[0]].get(other.leaf, ("", "", None, b""))
        if form is not None and form == its_form:
            starts = range(0, len(checksums), DIGEST)
            differing = [
                start // DIGEST for start in starts
                if checksums[start : start + DIGEST] != its_checksums[start : start + DIGEST]
            ]  # fmt: skip
            other.chunks, other.partial = differing[:MAX_CHUNKS], len(differing) > MAX_CHUNKS
    others = [other for other in others if other.chunks]
    if not others:
        return {}

    def chunk(leaf: int, number: int) -> AnyArray:
        array = mine[leaf].array
        assert array is not None, "this rank has described it as one"
        return chunk_of(array, number)

    pieces = {(other.leaf, number) for other in others for number in other.chunks}
    sent = {piece: chunk(*piece) for piece in pieces} if index == reference else {}
    received: dict[tuple[int, int], AnyArray] = tell(sent)[reference]
    found = Differences()
    for other in others:
        for number in other.chunks if index == other.members[0] else ():
            found.add(number, chunk(other.leaf, number), received[other.leaf, number])
    results: list[Differences] = tell(found)
    return {other.members[0]: results[other.members[0]] for other in others}


def _text(
    other: DifferingRanks,
    found: Differences | None,
    leaves: list[dict[int, tuple[str, str, Any, bytes]]],
    same: list[int],
    ranks: Sequence[int],
) -> str:
    """Return how one group of ranks differs from the reference."""
    nothing = ("", "nothing", None, b"")
    path, there, form, _ = leaves[same[0]].get(other.leaf, nothing)
    its_path, here, _, _ = leaves[other.members[0]].get(other.leaf, nothing)
    names = rank_list(ranks[i] for i in other.members)
    several = len(other.members) > 1
    reference = f" from {rank_list([ranks[same[0]]])}" if len(same) == 1 else ""
    where = f" at {path or its_path}" if path or its_path else ""
    if found is None:
        return f"{names} differ{'' if several else 's'}{reference}{where}: {here} instead of {there}"
    if not found.count:
        return (
            f"{names} differed{reference}{where}, and no more when compared again: "
            "another process writes to that memory"
        )
    shape = form[1]
    place = [int(i) for i in np.unravel_index(found.first, shape)]
    where = f" at {path}{place}" if path and place else f" at {place}" if place else where
    size = int(np.prod(shape, dtype=object))
    apart = f", at most {found.apart:.2g} apart" if 0 < found.apart < float("inf") else ""
    least = "at least " if other.partial else ""
    extent = f" ({least}{found.count} of {size} elements{apart})" if size > 1 else ""
    verb = "differ" if several else "differs"
    return f"{names} {verb}{reference}{where}: {found.here} instead of {found.there}{extent}"
