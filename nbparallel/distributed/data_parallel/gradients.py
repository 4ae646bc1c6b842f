"""Gradient averaging: many arrays in few reductions.

Arrays of one dtype are packed into flat buckets, each of which is one all_reduce; a large array is a bucket
of its own, reduced in place.  The buckets follow from dtypes, shapes and the number of ranks, and values are
combined in rank order, so that every rank gets the same bits.

Comparing what the ranks pass needs no synchronisation of its own: the fingerprint of the first reduction
covers the names, dtypes and shapes of all arrays.  A rank that passes a weight, or shared memory that another
rank could pass as well, takes part in that synchronisation with a declaration instead of a bucket.  If the
ranks differ in this, nothing has been written, and all of them exchange declarations.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from nbparallel.distributed.arguments import check_apart
from nbparallel.distributed.collectives.group_collectives import GroupCollectives
from nbparallel.distributed.collectives.reduce import Averaging, Reduce
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import (
    AnyArray,
    SharedArrayLookup,
    SharedSpan,
    as_operand,
    read_only,
)
from nbparallel.distributed.slots.mismatch import overlap
from nbparallel.distributed.slots.slot_area import Fingerprint, Span, conflict, fingerprint
from nbparallel.errors import CollectiveMismatchError, grouped, rank_list
from nbparallel.sharing.tensors import (
    bits_name,
    bits_operator,
    gradient_of,
    is_module,
    is_tensor,
    named_gradients,
    number_kind,
    shown_dtype,
)
from nbparallel.wire.control import Operation
from nbparallel.wire.segments import CLIENT_SHIFT

# Which gradients travel together: what follows from names, dtypes and shapes alone, worked out once.
#
# A training loop averages arrays of the same forms again and again, so a plan is remembered by them.

BUCKET = 4 << 20
"""Bytes: far above what a reduction costs at least, and still in a last-level cache."""
ALONE = 8 << 10
"""Bytes for each member: copying a larger array into a bucket and back takes longer than a reduction of its
own, which takes the longer the more meet.  ``python -m benchmarks.operations.tuning``: the best, more or less
takes a tenth longer."""
Forms = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What all ranks do with arrays of the same names, dtypes and shapes."""

    names: tuple[str, ...] | None
    forms: Forms
    bucket_nbytes: int
    members: int
    label: Fingerprint
    """Equal where names, dtypes, shapes and the size of a bucket are."""
    operators: tuple[Averaging, Averaging]
    """Of the first bucket, by which ranks compare their labels, and of the others."""
    buckets: tuple[tuple[int, ...], ...]
    """Which arrays are reduced together: of one dtype, not empty."""

    def fits(
        self, names: tuple[str, ...] | None, arrays: list[Any], bucket_nbytes: Any, members: int
    ) -> bool:
        """Return whether it is the plan of this call, and each array a writable one of numpy.

        A loop that compares: to look a plan up, by a key made of all forms, takes twice as long.
        """
        if (
            len(arrays) != len(self.forms)
            or names != self.names
            or members != self.members
            or type(bucket_nbytes) is not int
            or bucket_nbytes != self.bucket_nbytes
        ):
            return False
        plain = np.ndarray
        for x, (dtype, shape) in zip(arrays, self.forms):  # noqa: B905 - as many; a keyword takes as long as x
            if type(x) is not plain or x.dtype is not dtype or x.shape != shape or not x.flags.writeable:
                return False
        return True

    def listing(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each array: what must be the same on all ranks."""
        names = names_of(self.names, len(self.forms))
        return [(n, shown_dtype(dtype), shape) for n, (dtype, shape) in zip(names, self.forms, strict=True)]


def names_of(names: tuple[str, ...] | None, count: int) -> tuple[str, ...]:
    """Return what messages call the arrays; None: they came as a list."""
    return tuple(f"[{i}]" for i in range(count)) if names is None else names


@functools.lru_cache(maxsize=64)
def plan_of(names: tuple[str, ...] | None, forms: Forms, bucket_nbytes: int, members: int) -> BucketPlan:
    """Return the plan."""
    content = bucket_nbytes, names_of(names, len(forms)), [(str(dtype), shape) for dtype, shape in forms]
    first = [shown_dtype(forms[0][0]), str(forms[0][1])] if forms else ["-", "-"]
    label = fingerprint("average_gradients", *first, content=content)
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in forms]
    buckets = _buckets(forms, sizes, bucket_nbytes, members * ALONE)
    together = tuple(map(tuple, buckets))
    operators = Averaging(lambda _: label, True), Averaging(lambda _: label, False)
    return BucketPlan(names, forms, bucket_nbytes, members, label, operators, together)


def _label_of_one(x: np.ndarray[Any, Any]) -> Fingerprint | None:
    if x.dtype.kind not in "fc" or not x.size:
        return None
    return plan_of(None, ((x.dtype, x.shape),), BUCKET, 1).label


ONE = Averaging(_label_of_one, True)
"""The operator of a list of one array: as quick as an all_reduce, its plan is found by dtype and shape."""


def _buckets(forms: Forms, sizes: list[int], bucket_nbytes: int, alone: int) -> list[list[int]]:
    found: list[list[int]] = []
    growing: dict[np.dtype[Any], list[int]] = {}
    filled: dict[np.dtype[Any], int] = {}
    for i, nbytes in enumerate(sizes):
        dtype = forms[i][0]
        if not nbytes:
            continue
        if nbytes >= min(bucket_nbytes, alone):
            found.append([i])
            continue
        if dtype not in growing or filled[dtype] + nbytes > bucket_nbytes:
            growing[dtype], filled[dtype] = [], 0
            found.append(growing[dtype])
        growing[dtype].append(i)
        filled[dtype] += nbytes
    return found


# The last call of `average_gradients`: a training loop repeats it, often with the same arrays.


@dataclass(slots=True)
class LastCall:
    """What is remembered of a rank's last call: a training loop repeats it, often with the same arrays."""

    plan: BucketPlan | None = None
    shared: Sequence[weakref.ref[AnyArray]] = ()
    """Its arrays, if all were shared; no two of them overlapped."""
    foreign: bool = False
    """Whether another rank could pass memory of one of those as well."""

    def is_repeated_by(self, arrays: list[Any], bucket_nbytes: Any, members: int) -> BucketPlan | None:
        """Return the plan if arrays are like those of the last call and no other rank could pass one."""
        plan = self.plan
        if plan is None or not plan.buckets or not plan.fits(None, arrays, bucket_nbytes, members):
            return None
        return plan if len(arrays) == 1 or (not self.foreign and self.are_apart(arrays)) else None

    def are_apart(self, arrays: list[AnyArray]) -> bool:
        """Whether no two can share memory: they are those of the last call, or each owns its memory."""
        if len(arrays) == len(self.shared):
            return all(map(operator.is_, map(operator.call, self.shared), arrays))
        for x in arrays:
            if x.base is not None:
                return False
        return len(set(map(id, arrays))) == len(arrays)


_DECLARES_LABEL = fingerprint("average_gradients", content="declaration")
_DECLARES = Averaging(lambda _: _DECLARES_LABEL, True)
Declaration = tuple[int, float | None, list[Span]]
"""What a rank declares: fingerprint word of its arrays, weight, shared memory."""


@dataclass(slots=True)
class Gradients:
    """The arrays of one call, checked, in the order in which all ranks take them."""

    arrays: list[AnyArray]
    weight: float | None
    plan: BucketPlan
    foreign: bool
    """Whether another rank could pass memory of one of several arrays as well."""

    def declaration(self, memory: SharedArrayLookup) -> Declaration:
        """Return this rank's declaration."""
        spans = [(place.segment, place.start, place.stop) for place in _places(self.arrays, memory)]
        return self.plan.label.word, self.weight, spans


def checked_gradients(
    arrays: Any,
    weight: Any,
    bucket_nbytes: Any,
    members: int,
    context: RankContext,
    last: LastCall,
) -> Gradients:
    """Return what a user passed to `average_gradients`; its errors name the array that is wrong."""
    names: tuple[str, ...] | None = None
    if is_module(arrays):
        arrays = named_gradients(arrays)
    if type(arrays) is list:
        passed = arrays
    elif isinstance(arrays, np.ndarray) or is_tensor(arrays):
        names, passed = ("",), [arrays]
    elif isinstance(arrays, Mapping):
        entries = sorted(((f"[{key!r}]", x) for key, x in arrays.items()), key=lambda entry: entry[0])
        names, passed = tuple(name for name, _ in entries), [x for _, x in entries]
    elif isinstance(arrays, Iterable) and not isinstance(arrays, str | bytes):
        passed = list(arrays)
    else:
        raise TypeError(
            "average_gradients needs an array, a list of arrays or a dict of them, not "
            f"{type(arrays).__name__}"
        )
    plan, plain = last.plan, passed
    if plan is None or not plan.fits(names, passed, bucket_nbytes, members):
        names, passed = _gradients_of(names, passed)
        plain = [_checked(names, i, x) for i, x in enumerate(passed)]
        if plan is not None and not plan.fits(names, plain, bucket_nbytes, members):
            plan = None
    foreign = len(plain) > 1 and _check_memory(plain, names, context, last)
    if type(bucket_nbytes) is not int or bucket_nbytes < 1:
        raise ValueError(f"bucket_nbytes must be a number of bytes, at least 1, not {bucket_nbytes!r}")
    if weight is not None:
        weight = _checked_weight(weight)
    if plan is None:
        last.plan = plan = plan_of(names, tuple([(x.dtype, x.shape) for x in plain]), bucket_nbytes, members)
    return Gradients(plain, weight, plan, foreign)


def _places(arrays: list[AnyArray], memory: SharedArrayLookup) -> list[SharedSpan]:
    """Return where those arrays lie that are in shared memory."""
    found = [memory.span_of(x) for x in arrays if x.base is not None]
    return [place for place in found if place is not None]


def _check_memory(
    arrays: list[AnyArray], names: tuple[str, ...] | None, context: RankContext, last: LastCall
) -> bool:
    """Raise if two of the arrays share memory; return whether another rank could pass some of it as well.

    Memory that this rank allocated is not: a rank that received it declares it.
    """
    if last.are_apart(arrays):
        return last.foreign and len(arrays) == len(last.shared)
    named = zip(names_of(names, len(arrays)), arrays, strict=True)
    check_apart({f"arrays{name}": x for name, x in named}, "average_gradients")
    places = _places(arrays, context.memory)
    foreign = any(place.segment >> CLIENT_SHIFT != context.store.client for place in places)
    if len(places) == len(arrays):
        last.shared, last.foreign = [place.reference for place in places], foreign
    return foreign


def _gradients_of(
    names: tuple[str, ...] | None, passed: Sequence[Any]
) -> tuple[tuple[str, ...] | None, list[Any]]:
    """Return what was passed, of torch's parameters the gradients, if they have one."""
    found = [gradient_of(x) for x in passed]
    kept = [i for i, x in enumerate(found) if x is not None or passed[i] is None]
    return None if names is None else tuple(names[i] for i in kept), [found[i] for i in kept]


def _checked(names: tuple[str, ...] | None, index: int, x: Any) -> AnyArray:
    name = f"arrays[{index}]" if names is None else f"arrays{names[index]}"
    array = as_operand(x)
    if array is None:
        raise TypeError(f"average_gradients averages numpy arrays in place; {name} is {type(x).__name__}")
    if number_kind(array.dtype) not in "fc":
        raise TypeError(
            f"an average needs floating-point numbers, and {name} is {array.dtype}: convert it first "
            "(.astype(float))"
        )
    if not array.flags.writeable:
        raise read_only(
            x,
            f"average_gradients writes the averages into {name}, which is read-only: pass a copy of it, "
            "`x.copy()`, which is returned",
        )
    return array


def _checked_weight(weight: Any) -> float:
    if not isinstance(weight, numbers.Real | np.bool_):
        raise TypeError(f"weight must be a number, such as len(batch), not {type(weight).__name__}")
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"weight must be a finite number and not negative, not {weight!r}")
    return value


def check_declarations(declared: Sequence[Declaration], ranks: Sequence[int]) -> tuple[bool, float | None]:
    """Return whether all ranks pass the same arrays, and the sum of their weights, None without any.

    Raises
    ------
    ValueError
        Some ranks pass a weight and some do not, all weights are 0, or two ranks would write the same
        shared memory.
    """
    if len({label for label, _, _ in declared}) > 1:
        return False, None
    found = conflict([[(span, True) for span in spans] for _, _, spans in declared])
    if found is not None:
        raise overlap(Operation.average_gradients, *(ranks[member] for member in found))
    weights = [weight for _, weight, _ in declared if weight is not None]
    if not weights:
        return True, None
    if len(weights) < len(ranks):
        with_weight = [rank for rank, (_, w, _) in zip(ranks, declared, strict=True) if w is not None]
        without = rank_list(set(ranks) - set(with_weight))
        raise ValueError(
            f"{rank_list(with_weight)} passed weight= to average_gradients, and {without} did not: all ranks "
            "must, or none"
        )
    total = math.fsum(weights)
    if not total:
        raise ValueError("the weights of all ranks are 0: there is nothing to average")
    return True, total


def by_rank(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return which ranks passed what, in words; empty if all passed the same."""
    found = grouped(zip(texts, ranks, strict=True))
    if len(found) == 1:
        return ""
    return "; ".join(f"{rank_list(passed)} passed {text}" for text, passed in found.items())


Form = tuple[str, str, tuple[int, ...]]


def mismatch(passed: Sequence[tuple[list[Form], int]], ranks: Sequence[int]) -> CollectiveMismatchError:
    """Return the error that names the first array in which ranks differ."""
    sizes = [f"bucket_nbytes={size}" for _, size in passed]
    counts = [f"{len(forms)} array{'s' if len(forms) != 1 else ''}" for forms, _ in passed]
    parts = [by_rank(sizes, ranks), by_rank(counts, ranks)]
    for forms in zip_longest(*(forms for forms, _ in passed)):
        texts = ["no more" if f is None else f"arrays{f[0]}, {f[1]} of shape {f[2]}" for f in forms]
        if len(set(texts)) > 1:
            parts.append(("the first that differs: " if parts[1] else "") + by_rank(texts, ranks))
            break
    text = "; ".join(part for part in parts if part)
    return CollectiveMismatchError(
        f"average_gradients: ranks passed different arrays: {text}. Nothing was written"
    )


def average(
    collectives: GroupCollectives,
    gradients: Gradients,
    context: RankContext,
    compared: bool,
    deadline_ns: int | None,
) -> None:
    """Replace all arrays by their averages over the ranks of a group.

    Parameters
    ----------
    compared : bool
        The first reduction has been tried already, and the ranks differ.
    """
    plan, arrays, reduction = gradients.plan, gradients.arrays, collectives.reductions
    declares = gradients.weight is not None or gradients.foreign or not plan.buckets
    if declares and not compared:  # it meets the first bucket of ranks that declare nothing, and all go on
        reduction.all_reduce(np.zeros(1), _DECLARES, deadline_ns)
    elif not compared and average_buckets(reduction, arrays, plan, deadline_ns):
        return

    def tell(value: Any) -> list[Any]:
        shown = arrays[0] if arrays else None
        return collectives.exchange_values(Operation.average_gradients, shown, value, deadline_ns)

    ranks = collectives.protocol.ranks
    same, total = check_declarations(tell(gradients.declaration(context.memory)), ranks)
    if not same:
        raise mismatch(tell((plan.listing(), plan.bucket_nbytes)), ranks)
    average_declared(gradients, total, lambda flat, op: reduction.all_reduce(flat, op, deadline_ns))


def average_declared(
    gradients: Gradients, total: float | None, reduce: Callable[[AnyArray, str], object]
) -> None:
    """Average arrays, given the sum of all weights, by a reduction that combines one array of all ranks."""
    factor = None if total is None or gradients.weight is None else gradients.weight / total
    for flat in _flat_buckets(gradients.arrays, gradients.plan):
        _scale(flat, factor)
        reduce(flat, "avg" if factor is None else "sum")


def average_buckets(
    reduction: Reduce, arrays: list[AnyArray], plan: BucketPlan, deadline_ns: int | None
) -> bool:
    """Average arrays that no other rank could pass; False on all ranks: they differ, nothing was written."""
    run, line, (averaging, others) = reduction.all_reduce, reduction.line(), plan.operators
    for flat in _flat_buckets(arrays, plan):
        if run(flat, averaging, deadline_ns, line) is False:
            return False
        averaging = others
    return True


def _flat_buckets(arrays: list[AnyArray], plan: BucketPlan) -> Iterator[AnyArray]:
    """Yield the content of each bucket as one array, which is written back when the next is asked for."""
    for bucket in plan.buckets:
        if len(bucket) == 1:
            yield arrays[bucket[0]]
            continue
        parts = [arrays[i] for i in bucket]
        flat = np.concatenate([x.reshape(-1) for x in parts], dtype=parts[0].dtype)
        yield flat
        start = 0
        for x in parts:
            x[...] = flat[start : start + x.size].reshape(x.shape)
            start += x.size


def _scale(x: AnyArray, factor: float | None) -> None:
    if factor == 0:
        x[...] = 0  # the mean of an empty batch is NaN, and times 0 it still is
    elif factor is not None and bits_name(x.dtype):
        bits_operator("multiply", bits_name(x.dtype)).scale(x, factor)
    elif factor is not None:
        np.multiply(x, x.dtype.type(factor) if x.dtype.kind == "V" else factor, out=x)
