"""BatchMaker: makes one batch after the other, in whichever process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from nbparallel.multiprocessing.workers.loading.seeding import seeded

SHOWN_INDICES = 8
"""Indices that a message names."""
END = type("EndOfStream", (), {})
"""In place of a batch: the dataset has no more."""


class BatchMaker:
    """Makes the batches of a dataset.

    Parameters
    ----------
    dataset
        With ``__getitem__``, else with ``__iter__``.
    collate : callable or None
        Takes a list of samples, or one sample without batches; None: they stay as they are.
    batch_size : int or None
        None: no batches.  The number is that of a stream's batches.
    drop_last : bool
        Whether a stream's last samples are left out if they fill no batch.
    seed : int
        All random numbers follow from it.
    stream : bool
        Whether the dataset can only be iterated.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any] | None,
        batch_size: int | None,
        drop_last: bool,
        seed: int,
        stream: bool,
    ) -> None:
        self.dataset, self._collate = dataset, collate
        self._batch_size, self._drop_last, self.seed, self._stream = batch_size, drop_last, seed, stream
        self._epoch = -1
        self._part = 0
        self._made = 0
        self._remaining: Any = None

    def begin(self, epoch: int, *, part: int = 0) -> None:
        """Prepare for an epoch; `part`: of the stream that this process reads."""
        self._epoch, self._made, self._remaining = epoch, 0, None
        self._part = part if self._stream else 0

    def make(self, number: int, indices: Any, *, restore: bool) -> Any:
        """Return batch `number` of the epoch, `END` behind the last one of a stream.

        Raises
        ------
        Exception
            What the dataset or the collation raised, with a note that names the batch.
        """
        if self._stream:
            number, self._made = self._made, self._made + 1
        try:
            with seeded(self.seed, self._epoch, number, self._part, restore=restore):
                return self._next_of_stream() if self._stream else self._of_indices(indices)
        except StopIteration as error:  # it would end the caller's loop without a word
            raise RuntimeError(f"a sample of {describe(number, indices)} raised StopIteration") from error
        except Exception as error:
            error.add_note(f"in {describe(number, indices)} of the loader")
            raise

    def _of_indices(self, indices: Any) -> Any:
        if self._batch_size is None:
            sample = self.dataset[indices]
            return sample if self._collate is None else self._collate(sample)
        several = getattr(self.dataset, "__getitems__", None)
        samples = several(indices) if several is not None else [self.dataset[n] for n in indices]
        return samples if self._collate is None else self._collate(samples)

    def _next_of_stream(self) -> Any:
        if self._remaining is None:
            self._remaining = iter(self.dataset)
        if self._batch_size is None:
            for sample in self._remaining:
                return sample if self._collate is None else self._collate(sample)
            return END
        samples = list(itertools.islice(self._remaining, self._batch_size))
        if not samples or (len(samples) < self._batch_size and self._drop_last):
            return END
        return samples if self._collate is None else self._collate(samples)


def describe(number: int, indices: Any) -> str:
    """Name a batch and its samples.

    >>> describe(2, [4, 5]), describe(0, list(range(10, 30))), describe(1, None)
    ('batch 2 (samples 4, 5)', 'batch 0 (samples 10, 11, 12, 13, 14, 15, 16, 17 and 12 more)', 'batch 1')
    """
    if indices is None:
        return f"batch {number}"
    if not isinstance(indices, list):
        return f"batch {number} (sample {indices!r})"
    more = f" and {len(indices) - SHOWN_INDICES} more" if len(indices) > SHOWN_INDICES else ""
    return f"batch {number} (samples {', '.join(map(repr, indices[:SHOWN_INDICES]))}{more})"
