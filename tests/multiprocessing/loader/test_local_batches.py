"""The loader without workers: what forms a batch, what it may be told, what it refuses."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest

import nbparallel.multiprocessing as mp

Point = collections.namedtuple("Point", "x y")


def batches(*args: Any, **options: Any) -> list[Any]:
    """Return one epoch's batches of indices as lists."""
    return [batch.tolist() for batch in mp.DataLoader(*args, **options)]


def test_every_kind_of_sample_is_collated() -> None:
    """Arrays are stacked, numbers are arrays, strings lists; dictionaries and tuples keep their class."""
    sample = {"a": np.ones((2, 3), "f4"), "n": 1, "s": "x", "p": Point(1.5, True), "l": [np.int8(1), b"y"]}
    batch = mp.default_collate([sample] * 4)
    assert batch["a"].shape == (4, 2, 3)
    assert batch["a"].dtype == np.float32
    assert batch["n"].tolist() == [1] * 4
    assert batch["s"] == ["x"] * 4
    assert type(batch["p"]) is Point
    assert batch["p"].x.dtype == float
    assert batch["p"].y.dtype == bool
    assert type(batch["l"]) is list
    assert batch["l"][0].dtype == np.int8
    assert batch["l"][1] == [b"y"] * 4
    assert mp.default_collate([np.array(1.5), np.array(2.5)]).tolist() == [1.5, 2.5]
    assert mp.default_collate([np.zeros(2, int), np.ones(2)]).dtype == float
    assert mp.default_collate([np.arange(3)[::-1], np.arange(3)]).tolist() == [[2, 1, 0], [0, 1, 2]]


def test_tensors_are_stacked_as_tensors() -> None:
    """Of any dtype; a gradient's history is kept where no memory is shared."""
    torch = pytest.importorskip("torch")
    batch = mp.default_collate([(torch.full((2,), float(n)), n) for n in range(3)])
    assert torch.equal(batch[0], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert mp.default_collate([torch.ones(2, dtype=torch.bfloat16)] * 2).dtype is torch.bfloat16
    assert mp.default_collate([torch.ones(2, requires_grad=True)] * 2).requires_grad


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        ([], ValueError, "no samples"),
        ([np.ones(2), np.ones(3)], ValueError, r"\(2,\), and \(3,\) at place 1"),
        ([{"a": [np.ones(2)]}, {"a": [np.ones((2, 1))]}], ValueError, r"part \['a'\]\[0\] of samples"),
        ([(1, 2), (1,)], ValueError, "lengths"),
        ([{"a": 1}, {"b": 1}], ValueError, "keys"),
        ([{"a": None}], TypeError, r"part \['a'\] of samples of class NoneType .* collate_fn"),
    ],
)
def test_what_cannot_be_collated(samples: list[Any], error: type[Exception], words: str) -> None:
    """The error names the part of the samples, what is wrong with it, and the way out."""
    with pytest.raises(error, match=words):
        mp.default_collate(samples)


@pytest.mark.parametrize(
    ("arguments", "options", "formed"),
    [
        ((range(5), 2), {}, [[0, 1], [2, 3], [4]]),
        ((range(5), 2), {"drop_last": True}, [[0, 1], [2, 3]]),
        ((range(5),), {}, [[0], [1], [2], [3], [4]]),
        ((range(9), 2), {"sampler": [5, 3, 1]}, [[5, 3], [1]]),
        ((range(9),), {"batch_sampler": [[5, 3], (1,)]}, [[5, 3], [1]]),
        (({"a": 1, "b": 2},), {"sampler": ["b", "a"]}, [[2], [1]]),
        (("abc", None), {}, ["a", "b", "c"]),
        ((range(4), 3), {"collate_fn": sum}, [3, 3]),
        (([], 3), {}, []),
    ],
)
def test_what_forms_a_batch(arguments: Any, options: dict[str, Any], formed: list[Any]) -> None:
    """The rules of torch: order, sampler, batches of a sampler, a last one that is not full, none at all.

    `len` is the number of batches, as tqdm needs it.
    """
    loader = mp.DataLoader(*arguments, **options)
    assert [batch.tolist() if isinstance(batch, np.ndarray) else batch for batch in loader] == formed
    assert len(loader) == len(formed)


def test_streams() -> None:
    """A dataset that can only be iterated is read once an epoch, in its own order."""

    class Stream:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return iter(range(5))

    assert batches(Stream(), 2) == [[0, 1], [2, 3], [4]]
    assert len(mp.DataLoader(Stream(), 2)) == 3
    assert batches(Stream(), 2, drop_last=True) == [[0, 1], [2, 3]]
    assert list(mp.DataLoader(Stream(), None)) == [0, 1, 2, 3, 4]
    loader = mp.DataLoader(Stream(), 4)
    assert [len(list(loader)) for _ in range(2)] == [2, 2]
    with pytest.raises(TypeError):
        len(mp.DataLoader(iter(range(5))))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"num_workers": -1}, "num_workers"),
        ({"timeout": 3}, "without workers"),
        ({"prefetch_factor": 0}, "prefetch_factor"),
        ({"seed": -1}, "seed"),
        ({"start_method": "other"}, "other"),
        ({"sampler": [1], "shuffle": True}, "exclude"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "excludes"),
        ({"batch_size": None, "drop_last": True}, "drop_last"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], words: str) -> None:
    """They are refused when the loader is made, by name."""
    with pytest.raises(ValueError, match=words):
        mp.DataLoader(range(3), **options)


def test_wrong_datasets() -> None:
    """What cannot be read, has no length or its own order is refused by name."""
    with pytest.raises(TypeError, match="int has neither"):
        mp.DataLoader(3)
    with pytest.raises(TypeError, match="Endless has no length"):
        mp.DataLoader(type("Endless", (), {"__getitem__": lambda self, n: n})())
    with pytest.raises(ValueError, match="its own order"):
        mp.DataLoader(iter([1]), shuffle=True)


def test_an_order_of_each_epoch_follows_from_the_seed() -> None:
    """Another one in each epoch and for each seed; without a seed another in each loader."""
    loader = mp.DataLoader(range(50), 50, shuffle=True, seed=3)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert sorted(first[0]) == sorted(second[0]) == list(range(50))
    again = mp.DataLoader(range(50), 50, shuffle=True, seed=3)
    assert [[batch.tolist() for batch in again] for _ in range(2)] == [first, second]
    assert batches(range(50), 50, shuffle=True, seed=4) != first
    assert batches(range(50), 50, shuffle=True) != batches(range(50), 50, shuffle=True)


class Noise:
    """Random numbers of each generator."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, n: int) -> tuple[float, float]:
        return random.random(), np.random.rand()


def test_random_numbers_of_the_caller_go_on() -> None:
    """What the loader seeds for a batch is put back: the caller's own numbers are as without it."""
    random.seed(1)
    np.random.seed(1)
    expected = [(random.random(), np.random.rand()) for _ in range(3)]
    random.seed(1)
    np.random.seed(1)
    found, numbers = [], []
    for x, y in mp.DataLoader(Noise(), 2, seed=9):
        found.append((random.random(), np.random.rand()))
        numbers += [*x.tolist(), *y.tolist()]
    assert found == expected
    assert len(set(numbers)) == 12
    assert numbers == [z for x, y in mp.DataLoader(Noise(), 2, seed=9) for z in (*x.tolist(), *y.tolist())]


def test_a_failing_sample_is_named() -> None:
    """The exception is the dataset's, with a note; the iteration goes on behind it."""

    def sample(self: object, n: int) -> int:
        if n == 3:
            raise KeyError("three")
        if n == 4:
            raise StopIteration
        return n

    loader = mp.DataLoader(type("Holed", (), {"__getitem__": sample, "__len__": lambda self: 6})(), 1)
    iteration = iter(loader)
    assert [int(next(iteration)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError) as caught:
        next(iteration)
    assert caught.value.__notes__ == ["in batch 3 (samples 3) of the loader"]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iteration)
    assert [batch.tolist() for batch in iteration] == [[5]]
    assert mp.get_worker_info() is None
