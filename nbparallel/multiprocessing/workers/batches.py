"""Batches: how one is made and collated, in whichever process, and what a worker of a loader is."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import process
from typing import Any

import numpy as np

from nbparallel.multiprocessing.messages.parcels import SharedPayload, current_membership
from nbparallel.multiprocessing.starting.worker_threads import limit_threads
from nbparallel.multiprocessing.workers.task_interrupts import worker_place
from nbparallel.sharing import get_sharing_strategy
from nbparallel.sharing.tensor_storage import is_dense, shared_storage
from nbparallel.sharing.tensors import is_tensor
from nbparallel.transfer.pickle_format import LARGE
from nbparallel.wire.system import ImportHook

_TORCH = "torch.utils.data._utils.worker"
SHOWN_INDICES = 8
"""Indices that a message names."""


class EndOfStream:
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
        self._remaining: Any = None

    def begin(self, epoch: int) -> None:
        """Prepare for an epoch."""
        self._epoch, self._remaining = epoch, None

    def make(self, number: int, indices: Any, *, restore: bool) -> Any:
        """Return batch `number` of the epoch, `EndOfStream` behind the last one of a stream.

        Raises
        ------
        Exception
            What the dataset or the collation raised, with a note that names the batch.
        """
        try:
            with seeded(self.seed, self._epoch, number, restore=restore):
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
            return EndOfStream
        samples = list(itertools.islice(self._remaining, self._batch_size))
        if not samples or (len(samples) < self._batch_size and self._drop_last):
            return EndOfStream
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


_WORDS = 8
"""32-bit words of each generator's seed.  Of the same words Python and numpy would make the same numbers."""


@contextlib.contextmanager
def seeded(*numbers: int, restore: bool) -> Iterator[None]:
    """Seed `random`, `numpy.random` and, where it is loaded, torch from numbers that name a batch.

    Parameters
    ----------
    restore : bool
        Put back afterwards what was there: the generators are the caller's.
    """
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    before = (
        (random.getstate(), np.random.get_state(), None if generator is None else generator.get_state())
        if restore
        else None
    )
    pythons, numpys, torchs = np.random.SeedSequence(numbers).generate_state(3 * _WORDS).reshape(3, _WORDS)
    random.seed(int.from_bytes(pythons.tobytes(), "little"))
    np.random.seed(numpys)
    if generator is not None:
        generator.manual_seed(int(torchs[0]) << 31 | int(torchs[1]) >> 1)
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
            if generator is not None:
                generator.set_state(before[2])


class WorkerInfo:
    """What a dataset learns about the worker that it is used in, as in torch.

    Attributes
    ----------
    id : int
        0 … num_workers - 1.
    num_workers : int
    seed : int
        Of this worker.  Random numbers of a batch do not depend on it.
    dataset
        This worker's copy.
    """

    def __init__(self, identifier: int, num_workers: int, seed: int, dataset: Any) -> None:
        self.id, self.num_workers, self.seed, self.dataset = identifier, num_workers, seed, dataset

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, num_workers={self.num_workers}, seed={self.seed})"


_own: list[WorkerInfo] = []


def get_worker_info() -> Any:
    """Return the `WorkerInfo` of the loader's worker that this process is; None in any other process.

    Examples
    --------
    >>> get_worker_info() is None
    True
    """
    if _own:
        return _own[0]
    torch = sys.modules.get(_TORCH)
    return None if torch is None else torch.get_worker_info()


class _Worker:
    """A worker of a loader, which its process is."""

    maker: BatchMaker
    failure: Exception | None = None
    """What it raised when it began: so does each of its batches."""
    run = -1
    """The iteration for which it made its last batch."""


_worker = _Worker()


def begin_worker(given: Any, num_workers: int, seeds: list[int]) -> None:
    """Begin as a worker of a loader, whose number is this process's place in its pool.

    It is `given` what makes batches, and the loader's `worker_init_fn`, perhaps as a `SharedPayload`.
    """
    _worker.run, _worker.failure = -1, None  # a worker of a loader may have forked this one
    try:
        maker, worker_init_fn = given.open() if isinstance(given, SharedPayload) else given
        (number,) = worker_place
        _worker.maker = maker
        _own[:] = [WorkerInfo(number, num_workers, seeds[number], maker.dataset)]
        limit_threads(1)  # as torch's own workers: there are as many processes as are wanted
        _tell_torch()
        if worker_init_fn is not None:
            worker_init_fn(number)
    except Exception as error:  # noqa: BLE001  whatever the user's code raises
        _worker.failure = error


def make_batch(run: int, epoch: int, number: int, indices: Any) -> Any:
    """Return a batch."""
    if _worker.failure is not None:
        raise _worker.failure
    if run != _worker.run:
        _worker.run = run
        _worker.maker.begin(epoch)
    _tell_torch()
    return _worker.maker.make(number, indices, restore=False)


def _tell_torch() -> None:
    ImportHook(_TORCH, f"{__name__}.answer_torch").install()  # what asks it may also be what loads it


def answer_torch() -> None:
    """Set what torch's datasets ask for; called when torch is there."""
    vars(sys.modules[_TORCH])["_worker_info"] = _own[0]


# Collation: samples to a batch, stacked in shared memory where a worker does it.

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
