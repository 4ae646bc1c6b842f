"""Sampling: which samples form each batch of an epoch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated: it has no ``__getitem__``, or is torch's of that kind.

    Raises
    ------
    TypeError
        It can be used in neither way.
    """
    torch = sys.modules.get("torch.utils.data")
    kind = getattr(torch, "IterableDataset", None)
    if kind is not None and isinstance(dataset, kind):
        return True
    if hasattr(dataset, "__getitem__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise TypeError(
        f"a dataset has __getitem__ and __len__, or __iter__; {type(dataset).__name__} has neither"
    )


class SamplingPlan:
    """What a loader was given for the choice of samples, checked.

    Raises
    ------
    ValueError
        Arguments exclude each other, or are out of range.
    TypeError
        The dataset has no length, and there is no sampler either.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool,
        sampler: Iterable[Any] | None,
        batch_sampler: Iterable[Any] | None,
        drop_last: bool,
    ) -> None:
        self.stream = is_stream(dataset)
        if self.stream and (shuffle or sampler is not None or batch_sampler is not None):
            raise ValueError(
                "a dataset that can only be iterated has its own order: pass no shuffle, sampler or "
                "batch_sampler"
            )
        if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
            raise ValueError("batch_sampler excludes batch_size, shuffle, sampler and drop_last")
        if sampler is not None and shuffle:
            raise ValueError("sampler and shuffle exclude each other: a sampler is an order")
        if batch_size is None and drop_last:
            raise ValueError("batch_size=None makes no batches, so that drop_last means nothing")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}; None: no batches")
        if not self.stream and sampler is None and batch_sampler is None and not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length (__len__): pass a sampler, which yields indices"
            )
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler

    def batches(self, seed: int, epoch: int) -> Iterator[Any]:
        """Yield the indices of each batch: a list, or one index without batches."""
        if self.batch_sampler is not None:
            yield from map(list, self.batch_sampler)
            return
        indices: Iterable[Any]
        if self.sampler is not None:
            indices = self.sampler
        elif self.shuffle:
            order = np.random.default_rng(np.random.SeedSequence((seed, epoch)))
            indices = order.permutation(len(self.dataset)).tolist()
        else:
            indices = range(len(self.dataset))
        if self.batch_size is None:
            yield from indices
            return
        remaining = iter(indices)
        while batch := list(itertools.islice(remaining, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield batch

    def count(self) -> int:
        """Return the number of batches."""
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        samples: Any = self.dataset if self.sampler is None else self.sampler
        n = len(samples)
        if self.batch_size is None:
            return n
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)
