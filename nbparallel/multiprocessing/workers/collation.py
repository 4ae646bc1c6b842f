"""Collation: samples to a batch, stacked in shared memory where a worker does it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import process
from typing import Any

import numpy as np

from nbparallel.multiprocessing.messages.parcels import current_membership
from nbparallel.sharing import get_sharing_strategy
from nbparallel.sharing.tensor_storage import is_dense, shared_storage
from nbparallel.sharing.tensors import is_tensor
from nbparallel.transfer.pickle_format import LARGE

_NUMBERS = (bool, int, float, complex, np.generic)


def default_collate(batch: Sequence[Any]) -> Any:
    """Return samples as a batch: arrays stacked along a new first axis.

    In a worker batches of 256 KiB or more are stacked in shared memory, which arrives in the process that
    iterates without a copy; torch's ``DataLoader`` takes this function as its `collate_fn`.

    Parameters
    ----------
    batch : sequence of samples
        Alike in kind and shape.

    Returns
    -------
    ndarray
        Of arrays, numbers, or what numpy makes an array of: a copy of shape ``(len(batch), …)``.
    torch.Tensor
        Of tensors of torch.
    list
        Of strings or bytes, as they are.
    mapping, tuple, named tuple or list
        Of such: each part collated by itself.

    Raises
    ------
    ValueError
        The samples differ in shape, length or keys, or there are none.
    TypeError
        They are something else; pass a `collate_fn` of your own.

    Notes
    -----
    The rules are those of ``torch.utils.data.default_collate``, but that arrays and numbers stay numpy's and
    tuples stay tuples.

    Examples
    --------
    >>> default_collate([(1.5, "a"), (2.5, "b")])
    (array([1.5, 2.5]), ['a', 'b'])
    """
    samples = list(batch)
    if not samples:
        raise ValueError("there are no samples to collate")
    return _collate(samples, "")


def _collate(samples: list[Any], where: str) -> Any:
    first = samples[0]
    if is_tensor(first):
        return _stack_tensors(samples, where)
    if isinstance(first, np.ndarray):
        return _stack_arrays([np.asarray(sample) for sample in samples], where)
    if isinstance(first, str | bytes):
        return samples
    if isinstance(first, _NUMBERS):
        return np.array(samples)
    if isinstance(first, Mapping):
        return _collate_mappings(samples, where)
    if isinstance(first, tuple | list):
        return _collate_sequences(samples, where)
    if hasattr(first, "__array__"):
        return _stack_arrays([np.asarray(sample) for sample in samples], where)
    raise TypeError(
        f"{_of(where)} of class {type(first).__name__} cannot be collated: let the dataset return arrays, "
        "tensors, numbers, strings, or dictionaries and tuples of them, or pass a collate_fn"
    )


def _of(where: str) -> str:
    return f"part {where} of samples" if where else "samples"


def _collate_mappings(samples: list[Any], where: str) -> Any:
    first = samples[0]
    if any(sample.keys() != first.keys() for sample in samples):
        raise ValueError(f"{_of(where)}: their keys differ, so that they cannot be collated")
    found = {key: _collate([sample[key] for sample in samples], f"{where}[{key!r}]") for key in first}
    if type(first) is dict:
        return found
    try:
        return type(first)(found)
    except TypeError:  # it is made in another way
        return found


def _collate_sequences(samples: list[Any], where: str) -> Any:
    first = samples[0]
    if any(len(sample) != len(first) for sample in samples):
        raise ValueError(f"{_of(where)}: their lengths differ, so that they cannot be collated")
    parts = [_collate(list(part), f"{where}[{n}]") for n, part in enumerate(zip(*samples, strict=True))]
    if hasattr(first, "_fields"):
        return type(first)(*parts)
    return tuple(parts) if isinstance(first, tuple) else parts


def _stack_arrays(arrays: list[np.ndarray[Any, Any]], where: str) -> Any:
    shape = arrays[0].shape
    _check_shapes(arrays, where)
    dtype = arrays[0].dtype
    if any(array.dtype != dtype for array in arrays):
        dtype = np.result_type(*arrays)
    batch = _shared_memory((len(arrays), *shape), dtype)
    if batch is None:
        batch = np.empty((len(arrays), *shape), dtype)
    for row, array in zip(batch, arrays, strict=True) if shape else ():
        row[...] = array
    if not shape:
        batch[...] = arrays
    return batch


def _check_shapes(parts: list[Any], where: str) -> None:
    shape = parts[0].shape
    for n, part in enumerate(parts):
        if part.shape != shape:
            raise ValueError(
                f"{_of(where)} differ in shape: {tuple(shape)}, and {tuple(part.shape)} at place {n} of the "
                "batch; give them one shape, or pass a collate_fn"
            )


def _shared_memory(shape: tuple[int, ...], dtype: Any) -> Any | None:
    """Return an array in pooled shared memory; None where a private one serves as well."""
    if dtype.hasobject or math.prod(shape) * dtype.itemsize < LARGE or process.parent_process() is None:
        return None
    member = current_membership()
    return None if member is None or get_sharing_strategy() == "copy" else member.store.empty(shape, dtype)


def _stack_tensors(tensors: list[Any], where: str) -> Any:
    torch = sys.modules["torch"]
    first = tensors[0]
    _check_shapes(tensors, where)
    if all(is_tensor(tensor) and is_dense(tensor) and tensor.dtype == first.dtype for tensor in tensors):
        nbytes = len(tensors) * first.numel() * first.element_size()
        memory = _shared_memory((nbytes,), np.dtype(np.uint8))
        if memory is not None:
            batch = torch.empty(0, dtype=first.dtype).set_(
                shared_storage(memory), 0, (len(tensors), *first.shape)
            )
            torch.stack([tensor.detach() for tensor in tensors], out=batch)
            return batch
    return torch.stack(tensors)
