"""Batches: the samples that one rank uses in one epoch, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import part_of
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.errors import rank_list


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The numbers that decide which rank gets which sample when; the same on all ranks."""

    n: int
    """Samples."""
    batch_size: int
    """Samples of one rank in one batch."""
    epoch: int
    seed: int
    shuffle: bool
    drop_last: bool

    def steps(self, parts: int) -> int:
        """Return how many batches each of `parts` ranks has."""
        together = self.batch_size * parts
        return self.n // together if self.drop_last else -(-self.n // together)

    def order(self) -> AnyArray:
        """Return the samples in the order of this epoch: the same on every rank."""
        if not self.shuffle:
            return np.arange(self.n)
        # A stream for each epoch: seed 0 in epoch 1 is not seed 1 in epoch 0.
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.epoch,))).permutation(
            self.n
        )

    def of_part(self, part: int, parts: int) -> list[AnyArray]:
        """Return the samples of each batch of one rank.

        A step of all ranks takes the next ``parts * batch_size`` samples of the order, of which each rank has
        a contiguous part.  What is left for the last step is split evenly, the first parts longer by one.
        """
        together, order = self.batch_size * parts, self.order()
        full = self.n // together
        found = []
        if full:
            steps = order[: full * together].reshape(full, parts, self.batch_size)
            found = list(steps[:, part].copy())  # only this rank's part stays in memory
        if self.steps(parts) > full:
            left = order[full * together :]
            found.append(left[part_of(left.size, part, parts)].copy())
        return found


class Batches:
    """The batches of this rank in one epoch; ``dist.batches`` makes it.

    Iterating yields, for one array, its rows of each batch; for several, a tuple of the rows of each.  The
    rows are copies.  It can be iterated again, and needs no other rank.

    Attributes
    ----------
    indices : list of arrays
        Which samples each batch has.
    """

    def __init__(self, arrays: Sequence[AnyArray], indices: list[AnyArray]) -> None:
        self._arrays = tuple(arrays)
        self.indices = indices

    def __len__(self) -> int:
        """Return how many batches there are: the same number on every rank."""
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of each batch."""
        for index in self.indices:
            rows = tuple(array[index] for array in self._arrays)
            yield rows[0] if len(rows) == 1 else rows

    def __repr__(self) -> str:
        return f"<{len(self)} batches of {sum(len(i) for i in self.indices)} samples>"


def disagreement(plans: Mapping[int, BatchSchedule]) -> str:
    """Return what differs in the plans of ranks, in words; empty if nothing does."""
    texts = []
    fields: dict[int, dict[str, Any]] = {rank: asdict(plan) for rank, plan in plans.items()}
    for name in BatchSchedule.__slots__:
        passed: dict[Any, list[int]] = {}
        for rank, values in fields.items():
            passed.setdefault(values[name], []).append(rank)
        if len(passed) > 1:
            what = "the number of samples" if name == "n" else name
            texts.append(
                what + " is " + ", ".join(f"{value} on {rank_list(r)}" for value, r in passed.items())
            )
    return "; ".join(texts)
