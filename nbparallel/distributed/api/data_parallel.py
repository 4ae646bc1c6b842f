"""Data-parallel training, as a rank calls it: its part of the samples, batches, and average gradients.

A model is on every rank, the samples are divided, and after each batch the gradients are averaged, so that
all ranks take the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbparallel.distributed.api.operation_base import GroupLike, OperationBase, T, Timeout, untraced
from nbparallel.distributed.arguments import check_int, deadline, part_of
from nbparallel.distributed.data_parallel.gradients import (
    BUCKET,
    ONE,
    LastCall,
    average,
    average_buckets,
    by_rank,
    checked_gradients,
)
from nbparallel.distributed.equality.difference import digest_of, find_difference, flatten
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.errors import CollectiveMismatchError
from nbparallel.sharing.tensors import is_tensor
from nbparallel.wire.control import Operation

# Batches: the samples that one rank uses in one epoch, in order.


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The numbers that decide which rank gets which sample when; the same on all ranks."""

    samples: int
    batch_size: int
    """Samples of one rank in one batch."""
    epoch: int
    seed: int
    shuffle: bool
    drop_last: bool

    def steps(self, parts: int) -> int:
        """Return how many batches each of `parts` ranks has."""
        together = self.batch_size * parts
        return self.samples // together if self.drop_last else -(-self.samples // together)

    def order(self) -> AnyArray:
        """Return the samples in the order of this epoch: the same on every rank."""
        if not self.shuffle:
            return np.arange(self.samples)
        # A stream for each epoch: seed 0 in epoch 1 is not seed 1 in epoch 0.
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.epoch,))).permutation(
            self.samples
        )

    def of_part(self, part: int, parts: int) -> list[AnyArray]:
        """Return the samples of each batch of one rank.

        A step of all ranks takes the next ``parts * batch_size`` samples of the order, of which each rank has
        a contiguous part.  What is left for the last step is split evenly, the first parts longer by one.
        """
        together, order = self.batch_size * parts, self.order()
        full = self.samples // together
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


# assert_same, as a rank calls it.


class AssertSame(OperationBase):
    """Checks that the ranks of a group hold equal data."""

    def assert_same(self, x: Any, group: GroupLike = None, *, timeout: Timeout = None) -> None:
        """Raise on every rank, naming the ranks that differ and where, unless all hold equal data.

        All ranks must call it.  They exchange 16 bytes each.  Only if these differ, further exchanges locate
        the difference, in which only those pieces of arrays travel that differ.

        Parameters
        ----------
        x : array, number, or any picklable object
            Arrays or tensors of any dtype and layout are equal if dtype, shape and all elements' bytes are
            (0.0 and -0.0 are not); NaN equals NaN.  Numbers must be of the same type.  Lists, tuples, dicts
            (in whatever order of keys), views of them as ``d.keys()`` (in order), sets and objects are equal
            if their types and parts are; classes and functions if their names are, and a function's own code.

        Raises
        ------
        DifferentDataError
            On every rank, with the same message: which ranks agree, and for each other group of ranks the
            first place where it differs, both values, and how many elements do.  It is an `AssertionError`,
            and operations work after it.
        UnpicklableError
            On the caller: something in `x` cannot be compared.  Nothing was sent to the other ranks.
        """
        limit = deadline(timeout)
        state = self._group_state(group)
        digest = digest_of(flatten(x, exact=True))

        def exchange(value: Any) -> list[Any]:
            return self._exchange_values(state, Operation.assert_same, x, value, limit)

        if len(set(exchange(digest))) == 1:
            return
        error = find_difference(x, state.ranks, state.index, exchange)
        if error is not None:
            raise error


class DataParallel(OperationBase):
    """Small helpers on top of the operations, for training loops."""

    _last_call: LastCall | None = None
    """Of `average_gradients`."""

    @untraced
    def local_slice(self, n: Any, group: GroupLike = None) -> slice:
        """Return which part of ``range(n)`` is this rank's.

        No other rank has to call it.  Parts are contiguous, in the order of the ranks, and the first
        ``n % world_size`` are longer by one, as in `numpy.array_split`; with fewer than one for each rank,
        the last are empty.

        Parameters
        ----------
        n : int
            How many there are, such as ``len(x)``.
        group : Group, optional
            Divide among its members.

        Raises
        ------
        TypeError, ValueError
            `n` is not a number from 0, or this rank is not in the group.
        """
        if isinstance(n, np.ndarray | list | tuple):
            raise TypeError(
                "local_slice takes a number: write `dist.local_slice(len(x))`, or `dist.shard(x)` for "
                "the part"
            )
        count = check_int(n, "n", 0)
        state = self._group_table.world if group is None else self._group_table.know(group)
        if state.index < 0:
            raise ValueError(f"rank {self.rank} is not in {state.group}, and has no part")
        return part_of(count, state.index, len(state.ranks))

    @untraced
    def shard(self, x: T, group: GroupLike = None) -> T:
        """Return this rank's part of `x` along axis 0: ``x[local_slice(len(x))]``.

        No other rank has to call it.

        Parameters
        ----------
        x : array, tensor or sequence
            At least one axis.

        Returns
        -------
        array or sequence
            Of an array a view: the same memory, read-only if `x` is.  Of a list, tuple or range its slice.

        Raises
        ------
        TypeError, ValueError
            `x` cannot be divided, or this rank is not in the group.
        """
        whole: Any = x
        if isinstance(x, np.ndarray) or is_tensor(x):
            if whole.ndim == 0:
                raise ValueError("shard divides an array along axis 0, and this one has no axis")
        elif not isinstance(x, Sequence) or isinstance(x, str | bytes | bytearray):
            where = "dist.local_slice(len(x)) says which part is this rank's"
            if hasattr(x, "iloc"):  # of pandas
                where = "`x.iloc[dist.local_slice(len(x))]` is this rank's part of `x`"
            raise TypeError(f"shard divides an array or a list, not {type(x).__name__}; {where}")
        part: T = whole[self.local_slice(len(whole), group)]
        return part

    @untraced
    def batches(
        self,
        *arrays: AnyArray,
        batch_size: int,
        epoch: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        group: GroupLike = None,
    ) -> Batches:
        """Divide the samples of one epoch among the ranks, in batches: each sample exactly once.

        ``for xb, yb in dist.batches(x, y, batch_size=32, epoch=epoch): …``.  All ranks must call it, with
        the same numbers, which they compare.  The order follows from `seed` and `epoch` alone.

        Parameters
        ----------
        *arrays : array or tensor
            Equally long along axis 0, on all ranks; typically the notebook's, which all ranks see without a
            copy.
        batch_size : int
            Rows in one batch of one rank; together the ranks take `batch_size` times their number a step.
        epoch : int
            From 0: each has another order.
        seed : int
            From 0.
        shuffle : bool
            False: the order of the arrays.
        drop_last : bool
            What to do if the samples do not fill the last step of all ranks.  False: they are divided as
            evenly as can be, so that batches of one step differ by at most one row, and a rank may get a
            batch of none; pass ``weight=len(xb)`` to `average_gradients`.  True: they are left out of this
            epoch.

        Returns
        -------
        Batches
            Iterates over the rows of each batch (a tuple if there are several arrays); copies.  It has the
            same length on every rank, so collectives inside the loop are called equally often.  While it is
            made, each rank holds the whole order, 8 bytes a sample.

        Raises
        ------
        TypeError, ValueError
            On the caller, before anything was sent: no arrays, or of different lengths; a wrong number.  On
            all: with `drop_last` no batch is left.
        CollectiveMismatchError
            On all: ranks passed different numbers, or arrays of different length; operations work afterwards.
        """
        n = _length(arrays)
        plan = BatchSchedule(
            n, check_int(batch_size, "batch_size", 1), check_int(epoch, "epoch", 0),
            check_int(seed, "seed", 0), bool(shuffle), bool(drop_last),
        )  # fmt: skip
        state = self._group_state(group)
        replies: list[BatchSchedule] = self._exchange_values(state, Operation.batches, arrays[0], plan, None)
        passed = ([f"{name}={getattr(other, name)}" for other in replies] for name in BatchSchedule.__slots__)
        text = "; ".join(filter(None, (by_rank(texts, state.ranks) for texts in passed)))
        if text:
            raise CollectiveMismatchError(
                f"batches must be called with the same numbers on all ranks: {text}"
            )
        parts = len(state.ranks)
        if n and not plan.steps(parts):
            raise ValueError(
                f"{n} samples do not make one batch of {batch_size} on each of {parts} ranks, and drop_last "
                "leaves out what does not: use a smaller batch_size, or drop_last=False"
            )
        return Batches(arrays, plan.of_part(state.index, parts))

    def average_gradients(
        self,
        arrays: Any,
        *,
        weight: float | None = None,
        group: GroupLike = None,
        bucket_nbytes: int = BUCKET,
        timeout: Timeout = None,
    ) -> Any:
        """Replace arrays by their averages over all ranks, in place; all ranks must call it.

        Small arrays travel together, so that many cost little more than one.  Every rank gets the same bits,
        in every run.

        Parameters
        ----------
        arrays : array, list or dict of arrays or tensors; torch.nn.Module
            Floating-point or complex, of any layout; everywhere as many, of the same shapes and dtypes (of
            a dict also the same keys, in whatever order).  A module, and each parameter in a list, stands
            for its gradient; one that has none is left out.
        weight : float, optional
            How much this rank's count, typically the number of samples in its batch; by default all count
            the same.  The arrays of a rank with weight 0 count nothing, even where they are NaN.
        bucket_nbytes : int
            How many bytes travel together; everywhere the same.

        Returns
        -------
        array, list or dict
            `arrays` itself.

        Raises
        ------
        CollectiveMismatchError
            On all ranks: they passed different arrays; it names the first.  Nothing was written, and
            operations work afterwards.
        TypeError, ValueError
            On the caller: something that cannot be averaged in place.  On all: ranks passed the same shared
            memory, some a weight and some none, or only weights of 0.  Nothing was written.
        """
        limit = None if timeout is None else deadline(timeout)
        context, compared, last = self._context, False, self._last_call
        if weight is None and group is None and type(arrays) is list and (context.ready and context.plain):
            # As quick as an all_reduce of each: of one array, and of several like those of the last call.
            x = arrays[0] if len(arrays) == 1 and bucket_nbytes is BUCKET else None
            one, plan = type(x) is np.ndarray and x.flags.writeable, None
            if one or (
                last is not None and (plan := last.is_repeated_by(arrays, bucket_nbytes, self.world_size))
            ):
                reduction = self._world.reductions
                if plan is None:
                    found = self._run_step(reduction.all_reduce, x, ONE, limit)
                else:
                    found = self._run_step(average_buckets, reduction, arrays, plan, limit)
                if found is not None and found is not False:
                    return arrays
                compared = found is False
        if last is None:
            last = self._last_call = LastCall()
        state = self._group_state(group)
        gradients = checked_gradients(arrays, weight, bucket_nbytes, len(state.ranks), context, last)
        if (across := self._across and self._across.of(state)) is not None:
            self._run(state, limit, across.average, gradients)
        else:
            self._run(state, limit, average, gradients, context, compared)
        return arrays


def _length(arrays: Sequence[Any]) -> int:
    """Return how many samples there are."""
    if not arrays:
        raise TypeError("batches needs at least one array")
    for x in arrays:
        is_array = isinstance(x, np.ndarray) or is_tensor(x)
        if not is_array or not x.ndim:
            kind = "an array without an axis" if is_array else type(x).__name__
            raise TypeError(f"batches takes numpy arrays with one row for each sample, not {kind}")
    lengths = [len(x) for x in arrays]
    if len(set(lengths)) > 1:
        raise ValueError(f"the arrays must be equally long, one row for each sample, and have {lengths} rows")
    return lengths[0]
