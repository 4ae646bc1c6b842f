"""The loader beside torch's: large batches as they are, and smaller ones that are changed on the way.

python -m benchmarks.multiprocessing.loader [--rounds N]
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import nbparallel.multiprocessing as mp
from benchmarks.multiprocessing.launches import in_turns, print_rows
from benchmarks.report import Figure, Section, human_seconds

WORKERS = 2
IMAGE = (3, 256, 256)
"""Of 32-bit numbers: 786,432 bytes."""
DIFFERENT = 64
"""Images that there are; a sample is one of them, 50 MB together."""
OURS, ADAPTED, TORCH = "nbparallel", "torch with our processes", "torch"


class Images:
    """Images in memory.

    Parameters
    ----------
    count : int
        Samples.
    change : bool
        Whether a sample is flipped and scaled.
    """

    def __init__(self, count: int, *, change: bool) -> None:
        self._count, self._change = count, change
        numbers = np.random.default_rng(0)
        self._images = numbers.random((DIFFERENT, *IMAGE), np.float32)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, n: int) -> Any:
        image = self._images[n % DIFFERENT]
        return image[..., ::-1] * np.float32(0.5) if self._change else image


CASES = {
    "25 MB a batch, as they are": (32, 48, False, 3.0),
    "6 MB a batch, flipped and scaled": (8, 120, True, 1.2),
}
"""What -> images of a batch, batches, whether they are changed, the aim."""


def _loaders(data: Images, size: int) -> dict[str, Iterable[Any]]:
    from torch.utils.data import DataLoader

    return {
        OURS: mp.DataLoader(data, size, num_workers=WORKERS, start_method="fork"),
        ADAPTED: DataLoader(
            data,  # type: ignore[arg-type]
            size,
            num_workers=WORKERS,
            multiprocessing_context=mp.get_context("fork"),
            collate_fn=mp.default_collate,
            persistent_workers=True,
        ),
        TORCH: DataLoader(
            data,  # type: ignore[arg-type]
            size,
            num_workers=WORKERS,
            multiprocessing_context="fork",
            persistent_workers=True,
        ),
    }


def _check(loader: Iterable[Any], data: Images, size: int) -> None:
    for n, batch in enumerate(loader):
        expected = np.stack([data[k] for k in range(n * size, (n + 1) * size)])
        if not np.array_equal(np.asarray(batch), expected):
            raise AssertionError(f"batch {n} is wrong")


def _seconds(loader: Iterable[Any], batches: int) -> float:
    """Return the time of a batch, of an epoch whose batches are looked at and dropped."""
    began = time.perf_counter()
    count = sum(float(batch[0, 0, 0, 0]) >= 0 for batch in loader)
    if count != batches:
        raise AssertionError(f"{count} batches instead of {batches}")
    return (time.perf_counter() - began) / batches


def measure(rounds: int, report: Callable[[str], object] = lambda text: None) -> list[Figure]:
    """Return a row for each case."""
    rows = []
    for what, (size, batches, change, aim) in CASES.items():
        data = Images(size * batches, change=change)
        loaders = _loaders(data, size)
        for loader in loaders.values():
            _check(loader, data, size)
        took: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(rounds):
            for name in in_turns(tuple(loaders), turn):
                took[name].append(_seconds(loaders[name], batches))
        middle = {name: statistics.median(times) for name, times in took.items()}
        for name, value in middle.items():
            report(f"{what}: {name} {human_seconds(value)}")
        ratio = middle[TORCH] / middle[OURS]
        peer = ", ".join(f"{name} {human_seconds(middle[name])}" for name in (TORCH, ADAPTED))
        rows.append(
            Figure(what, human_seconds(middle[OURS]), peer, ratio, f"≥ {aim:g} × torch", ratio >= aim)
        )
        del loaders, loader
    return rows


def run(*, quick: bool) -> Section:
    """Measure the loaders, if torch is there."""
    there = importlib.util.find_spec("torch") is not None
    return Section(
        f"Batches of a loader with {WORKERS} workers",
        measure(2 if quick else 7) if there else [Figure("loaders", "not measured: torch is not installed")],
        "Time of a batch in an epoch of persistent workers, started by fork: one dataset of arrays for all. "
        "The third row's processes are ours, its loader torch's (`collate_fn=mp.default_collate`).",
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print_rows(measure(parser.parse_args().rounds, print))


if __name__ == "__main__":
    main()
