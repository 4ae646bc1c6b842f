"""Arguments: what users pass, checked, with errors that say what to write instead.

These checks run before the call writes anything that another rank reads, so only the caller raises.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from nbparallel.distributed.runtime.call_site import receive_text
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_operand, bounds, read_only
from nbparallel.errors import rank_list
from nbparallel.sharing.tensors import is_tensor


def part_of(n: int, part: int, parts: int) -> slice:
    """Return part number `part` of ``range(n)``; the first ``n % parts`` parts are longer by one.

    >>> [part_of(10, i, 4) for i in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
    """
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


MAX_TAG = (1 << 63) - 1
_MOST_SECONDS = 1e9
"""Of a time-out, some thirty years: its nanoseconds must fit into 63 bits."""
_MAX_WORK: Any = 10_000
"""Of numpy's search for a common byte; arrays that take more count as overlapping."""


class Missing:
    """The type of what was not passed, where None is a value."""

    def __repr__(self) -> str:
        return "…"


MISSING: Any = Missing()


class ProcNull(int):
    """The rank beyond the edge of a grid: nothing is sent to it, and nothing received from it.

    It is an int, as every rank is, and one that no arithmetic with ranks gives.
    """

    def __repr__(self) -> str:
        return "PROC_NULL"

    def __reduce__(self) -> str:
        return "PROC_NULL"


PROC_NULL: Final[int] = ProcNull(-(1 << 31))


def value_and_outputs(first: Any, second: Any, operation: str) -> tuple[Any, Any]:
    """Return this rank's value and what is to be filled (or `MISSING`).

    Operations are called as ``operation(x)``, as in torch ``operation(outputs, x)``, or with `x` by name.
    """
    if second is not MISSING:
        return second, first
    if first is MISSING:
        raise TypeError(f"{operation} needs what this rank brings: {operation}(x)")
    return first, MISSING


def check_int(value: Any, name: str, least: int | None = None) -> int:
    """Return a whole number, which no bool is."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int, not {type(value).__name__} {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)


def check_rank(rank: Any, name: str, ranks: Sequence[int], *, world: bool = True) -> int:
    """Return the index of a rank in `ranks`: those of the `world`, or of a group."""
    if check_int(rank, name) in ranks:
        return ranks.index(int(rank))
    if world:
        there = "there is only rank 0" if len(ranks) == 1 else f"ranks are 0-{len(ranks) - 1}"
        raise ValueError(f"{name}={rank}: there is no such rank; {there}")
    raise ValueError(
        f"{name}={rank} is not in the group of {rank_list(ranks)}: {name} counts in the world, group_{name} "
        "in the group"
    )


def check_group_rank(rank: Any, name: str, ranks: Sequence[int]) -> int:
    """Return a rank in the group of `ranks`."""
    if not 0 <= check_int(rank, name) < len(ranks):
        raise ValueError(f"{name}={rank}: the group has the ranks 0-{len(ranks) - 1}")
    return int(rank)


def check_tag(tag: Any, name: str = "tag") -> int:
    """Return a tag."""
    if not 0 <= check_int(tag, name) <= MAX_TAG:
        raise ValueError(f"{name} must be between 0 and 2**63 - 1, not {tag}")
    return int(tag)


def deadline(timeout: float | datetime.timedelta | None) -> int | None:
    """Return when a time-out from now ends, in nanoseconds of the monotonic clock; None: never."""
    if timeout is None:
        return None
    seconds: Any = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float | np.integer | np.floating):
        raise TypeError(f"timeout must be seconds or a timedelta, not {type(timeout).__name__}")
    if not seconds >= 0:  # NaN is not either
        raise ValueError(f"timeout is in seconds and must not be negative, not {timeout!r}")
    if math.isinf(seconds):
        return None
    return time.monotonic_ns() + int(min(float(seconds), _MOST_SECONDS) * 1e9)


def check_output(x: Any, operation: str) -> AnyArray:
    """Return an array (or tensor) that `operation` is to fill, as a plain one."""
    array = as_operand(x)
    if array is None:
        raise TypeError(f"{operation} fills numpy arrays, not {type(x).__name__}")
    if array.dtype.hasobject:
        raise TypeError(f"{operation} cannot fill an array of Python objects; without it the values return")
    if not array.flags.writeable:
        raise read_only(
            x,
            f"{operation} fills this array, and it is read-only: pass `x.copy()`, which is filled and "
            "returned",
        )
    return array


def check_list(values: Any, operation: str, what: str) -> None:
    """Raise if `values` is no list or tuple."""
    if not isinstance(values, list | tuple):
        raise TypeError(f"{operation} needs a list of {what}, not {type(values).__name__}")


def check_outputs(outputs: Any, size: int, operation: str, name: str) -> list[AnyArray]:
    """Return the arrays that `operation` is to fill, one for each member, none over another."""
    if not isinstance(outputs, list | tuple):
        raise TypeError(
            f"{operation}: {name} must be a list of {size} arrays, one for each rank, not "
            f"{type(outputs).__name__}"
        )
    if len(outputs) != size:
        raise ValueError(
            f"{operation}: {name} needs one array for each of the {size} ranks, and has {len(outputs)}"
        )
    arrays = [check_output(x, operation) for x in outputs]
    check_apart({f"{name}[{i}]": x for i, x in enumerate(arrays)}, operation)
    return arrays


def elements_of(x: Any) -> Any:
    """Return what is equal for arrays of the same elements in the same order; None for what is no array."""
    array = as_operand(x)
    return None if array is None else (bounds(array), array.shape, array.strides, array.dtype)


def check_apart(named: Mapping[str, Any], operation: str) -> None:
    """Raise if two arrays that `operation` fills share memory; what is no array passes."""
    arrays = {name: array for name, x in named.items() if (array := as_operand(x)) is not None}
    pair = overlapping_pair(list(arrays.values()))
    if pair is not None:
        one, other = (list(arrays)[i] for i in pair)
        raise ValueError(
            f"{one} and {other} share memory, and {operation} fills both: each needs memory of its own"
        )


def _each_its_own(arrays: Sequence[AnyArray]) -> bool:
    """Whether no two arrays look at memory of one owner: quick, and mostly so; False if it is not clear."""
    owners = set()
    for x in arrays:
        owner = x if x.base is None else x.base
        if type(owner) is not np.ndarray or not owner.flags.owndata:
            return False
        owners.add(id(owner))
    return len(owners) == len(arrays)


def overlapping_pair(arrays: Sequence[AnyArray]) -> tuple[int, int] | None:
    """Return two arrays that share memory, None if all are apart."""
    if _each_its_own(arrays):
        return None
    spans = sorted((*bounds(x), i) for i, x in enumerate(arrays) if x.size)
    active: list[tuple[int, int, int]] = []
    for start, stop, i in spans:
        active = [span for span in active if span[1] > start]
        for _, _, j in active:
            try:
                same = np.shares_memory(arrays[i], arrays[j], max_work=_MAX_WORK)
            except np.exceptions.TooHardError:
                same = True
            if same:
                return min(i, j), max(i, j)
        active.append((start, stop, i))
    return None


def parts_of(x: Any, size: int, operation: str) -> list[Any]:
    """Return one value for each member: of a sequence its elements, of an array its parts along axis 0.

    The first parts of an array are longer by one if it does not divide evenly, as `numpy.array_split`.
    """
    if isinstance(x, np.ndarray) or is_tensor(x):
        if x.ndim == 0:
            raise ValueError(f"{operation} splits an array along axis 0, and this one has no axis")
        return [x[part_of(len(x), part, size)] for part in range(size)]  # what `array_split` does, quicker
    array = as_operand(x)
    if array is not None:  # another library's
        return parts_of(array, size, operation)
    if not isinstance(x, Sequence) or isinstance(x, str | bytes | bytearray):
        raise TypeError(
            f"{operation} needs a sequence of {size} values, one for each rank, or an array to split along "
            f"axis 0, not {type(x).__name__}"
        )
    if len(x) != size:
        raise ValueError(f"{operation} needs one value for each of the {size} ranks, not {len(x)}")
    return list(x)


def rows_of(x: Any, sizes: Any, size: int, operation: str, name: str) -> list[AnyArray]:
    """Return the parts of an array along axis 0, of these sizes, or equal ones."""
    array = as_operand(x)
    if array is None or array.ndim == 0:
        raise TypeError(
            f"{name} of {operation} must be an array with at least one axis, not {type(x).__name__}"
        )
    if sizes is None:
        if len(array) % size:
            raise ValueError(
                f"{name} has {len(array)} rows, which do not divide equally among {size} ranks: pass its "
                "split sizes"
            )
        return np.split(array, size)
    counts = list(sizes) if isinstance(sizes, Sequence) or getattr(sizes, "ndim", 0) == 1 else [sizes]
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in counts):
        raise TypeError(f"the split sizes of {name} must be a list of {size} ints, not {sizes!r}")
    counts = [int(n) for n in counts]
    if len(counts) != size or min(counts) < 0 or sum(counts) != len(array):
        raise ValueError(
            f"the split sizes {counts} of {name} must be {size} numbers that add up to its {len(array)} rows"
        )
    return np.split(array, np.cumsum(counts)[:-1])


def equal_parts(x: Any, like: AnyArray, size: int, operation: str, name: str) -> list[AnyArray]:
    """Return the parts of `x`, each of the shape of `like`, behind each other or stacked."""
    array = as_operand(x)
    if array is None:
        raise TypeError(f"{name} of {operation} must be an array, not {type(x).__name__}")
    if array.shape == (size, *like.shape):
        return [array[i, ...] for i in range(size)]
    if like.ndim and array.shape == (size * like.shape[0], *like.shape[1:]):
        return np.split(array, size)
    raise ValueError(
        f"{name} of {operation} has shape {array.shape}, and {size} parts of shape {like.shape} make "
        f"{(size, *like.shape)}" + (f" or {(size * like.shape[0], *like.shape[1:])}" if like.ndim else "")
    )


def check_buffer(buffer: Any, src: Any, tag: Any) -> AnyArray:
    """Return what `recv` is to fill as a plain array.

    Parameters
    ----------
    src, tag : object
        As passed to `recv`: the error says what to write instead.

    Raises
    ------
    TypeError
        It is no array; a number was probably meant as the source.
    ValueError
        It is read-only.
    """
    array = as_operand(buffer)
    if array is not None and array.flags.writeable and not array.dtype.hasobject:
        return array
    tag = tag if isinstance(tag, int) else 0
    if isinstance(buffer, int | np.integer) and not isinstance(buffer, bool):
        raise TypeError(
            f"recv({buffer}) takes an array to fill, not a rank: write "
            f"`{receive_text('recv', int(buffer), tag)}`, which returns the value"
        )
    call = receive_text("recv", src if isinstance(src, int) else None, tag)
    instead = f"`x = {call}` needs none, and returns a new one"
    if array is None:
        raise TypeError(f"recv fills numpy arrays, not {type(buffer).__name__}; {instead}")
    if array.dtype.hasobject:
        raise TypeError(f"recv cannot fill an array of Python objects; {instead}")
    raise read_only(buffer, f"recv fills this array, and it is read-only; {instead}")
